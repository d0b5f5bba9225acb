#!/usr/bin/env bash
# One or two nodes of a cluster, played on this machine: a torchrun for each, two ranks under each.
#
#     examples/nodes.sh 2 examples/train.py --epochs 3
#     examples/nodes.sh 1 --max-restarts 3 examples/train.py --checkpoint train.pt
#
# On a real cluster you run the torchrun command below on every node, all with the address of one of
# them as the endpoint where they meet (the rendezvous). Here, where Linux lets it, each node gets a
# network of its own (a network namespace), and two are joined by a virtual cable: nobody outside
# can connect, and all is gone when the script ends, however it ends. Elsewhere the nodes share this
# machine's network and differ by their loopback address. Torchrun's store listens on all interfaces
# then, as it always does, and the script says so.
set -euo pipefail
nodes=$1
shift

isolate=(unshare --user --map-root-user --net --mount --pid --fork --kill-child)
if [ -z "${IN_NAMESPACE-}" ] && "${isolate[@]}" ip link add type veth 2>/dev/null; then
    IN_NAMESPACE=yes exec "${isolate[@]}" bash "$0" "$nodes" "$@"
fi

if [ -n "${IN_NAMESPACE-}" ]; then
    address=(10.0.0.1 10.0.0.2)
    enter=("" "nsenter --net=/run/netns/second")
    export GLOO_SOCKET_IFNAME=cable NCCL_SOCKET_IFNAME=cable
    mount -t tmpfs none /run # for a list of namespaces of our own, and the folders of torchrun
    export TMPDIR=/run
    ip netns add second
    ip link add cable type veth peer name cable netns second
    for i in 0 1; do
        ${enter[i]} ip link set lo up
        ${enter[i]} ip link set cable up
        ${enter[i]} ip addr add "${address[i]}/24" dev cable
    done
else
    echo "nodes.sh: no network namespaces here: torchrun listens on all interfaces meanwhile" >&2
    address=(127.0.0.1 127.0.0.1)
    enter=("" "")
    scratch=$(mktemp -d) # torchrun leaves folders behind
    export TMPDIR=$scratch
    if [ "$(uname)" = Linux ]; then
        address[1]=127.0.0.2
        export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
    fi
fi

# Without this, torch 2.13's torchrun hands the ranks of a restart the addresses of those before
# (pytorch issue 135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# Ended itself, it ends them; and so does the end of whoever holds the other end of its input.
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "${scratch-}"' EXIT
trap 'exit 143' TERM INT
if [ -p /dev/stdin ]; then
    { cat >/dev/null; kill $$; } <&0 &
fi
torchruns=()
for ((i = 0; i < nodes; i++)); do
    ${enter[i]} "${PYTHON:-python}" -m torch.distributed.run \
        --nnodes "$nodes" --nproc-per-node 2 --rdzv-id example --rdzv-backend c10d \
        --rdzv-endpoint "${address[0]}:${PORT:-29400}" --local-addr "${address[i]}" \
        --rdzv-conf "is_host=$((i == 0))" "$@" &
    torchruns+=($!)
done
# One that fails ends the script, and with it the other, which would wait for it for minutes.
for pid in "${torchruns[@]}"; do
    if [ "${BASH_VERSINFO[0]}" -ge 5 ]; then wait -n; else wait "$pid"; fi
done
