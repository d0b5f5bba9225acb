"""What an all-reduce costs: the alpha-beta model, fitted on this machine, used for larger ones.

python -m ddp_teach.cost_model

A message of b bytes takes alpha + b / beta seconds: a latency, however small it is, and then its
bytes at some bandwidth. In a ring all-reduce over n ranks every rank sends 2 (n - 1) messages, one
after the other, each an n-th of the tensor: once around to add up, once more to hand out the sums.

    2 (n - 1) alpha  +  2 (n - 1) / n * bytes / beta

The second part hardly grows with n, which is why rings are used; the first grows with it, which is
why buckets are large. (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 2009.)

The model takes every rank to have a processor of its own. With more ranks than cores on one machine
they wait for each other's turn, of which it knows nothing: its error says so.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ddp_teach.launch import launch

RANKS = range(2, 9)
SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)  # bytes of the all-reduces that are measured


@dataclass(frozen=True)
class Network:
    """``alpha``: seconds that a message takes however small it is. ``beta``: bytes per second from
    one rank to the next. ``source``: who says so."""

    alpha: float
    beta: float
    source: str = ""


class Sample(NamedTuple):
    """One all-reduce: over so many ``ranks``, of so many bytes, took so many seconds."""

    ranks: int
    nbytes: int
    seconds: float


NCCL_TABLE = "src/graph/tuning.cc of NCCL (commit 01afd20): ring, Simple protocol, over a network"

# Published figures; what is made of them here is modelled, never measured. Latencies are those with
# which NCCL itself chooses its algorithm.
NETWORKS = {
    # The eight GPUs of a server are one part of the ring, and its one network card carries it on.
    "100 Gb/s for 8 GPUs": Network(
        9.6e-6,
        100e9 / 8,
        "card: Mellanox ConnectX-4 with 100 Gb/s, one for each server of 8 GPUs, as in Li et al., "
        f"VLDB 2020, section 5; latency: {NCCL_TABLE}",
    ),
    # Eight cards, eight rings side by side.
    "400 Gb/s for each GPU": Network(
        9.6e-6,
        8 * 400e9 / 8,
        "cards: NVIDIA DGX H100 User Guide, eight ConnectX-7 ports of 400 Gb/s for 8 GPUs; "
        f"latency: {NCCL_TABLE}",
    ),
}


def all_reduce_seconds(nbytes: float, ranks: int, network: Network, messages: int = 1) -> float:
    """Seconds for all-reduces of ``nbytes`` in all, sent in so many ``messages`` (buckets).

    Raises ``ValueError`` for fewer than one rank or message, or a negative number of bytes.
    """
    if ranks < 1 or messages < 1 or nbytes < 0:
        raise ValueError(
            f"ranks and messages must be at least 1 and nbytes at least 0, got ranks={ranks}, "
            f"messages={messages}, nbytes={nbytes}."
        )
    latency = messages * 2 * (ranks - 1) * network.alpha
    return latency + 2 * (ranks - 1) / ranks * nbytes / network.beta


def step_bounds(compute: float, all_reduce: float) -> tuple[float, float]:
    """Seconds of a step: at best, all that can overlap does; at worst, nothing does."""
    return max(compute, all_reduce), compute + all_reduce


def efficiency(compute: float, step: float) -> float:
    """The share of a step in which a rank does what it would do alone: 1.0 scales perfectly."""
    return compute / step


def fit(samples: Sequence[Sample], rounds: int = 50) -> Network:
    """The alpha and beta with which the model comes closest to ``samples``.

    Least squares of the logarithms: twice as long is as wrong as half as long, for small tensors as
    for large ones. Raises ``ValueError`` for fewer than two samples over two ranks or more.
    """
    used = [s for s in samples if s.ranks > 1]
    if len(used) < 2:
        raise ValueError(f"fit needs two samples over at least 2 ranks, but got {len(used)}.")
    ranks, nbytes, seconds = (np.array(column, dtype=float) for column in zip(*used, strict=True))
    parts = np.stack([2 * (ranks - 1), 2 * (ranks - 1) / ranks * nbytes], axis=1)
    logs = np.log(np.median(seconds[:, None] / parts, axis=0) / 2)  # of alpha and of 1 / beta
    for _ in range(rounds):  # Gauss-Newton
        terms = parts * np.exp(logs)
        modelled = terms.sum(axis=1)
        slopes = terms / modelled[:, None]
        step, *_ = np.linalg.lstsq(slopes, np.log(seconds / modelled), rcond=1e-6)
        logs += np.clip(step, -1, 1)
    alpha, per_byte = np.exp(logs)
    return Network(float(alpha), float(1 / per_byte), "fitted")


def relative_error(sample: Sample, network: Network) -> float:
    """How far the model is above (+) or below (-) what was measured, as a share of the latter."""
    return all_reduce_seconds(sample.nbytes, sample.ranks, network) / sample.seconds - 1


def errors_by_ranks(samples: Iterable[Sample], network: Network) -> dict[int, float]:
    """For every number of ranks the median size of the relative errors."""
    found: dict[int, list[float]] = {}
    for sample in samples:
        found.setdefault(sample.ranks, []).append(abs(relative_error(sample, network)))
    return {ranks: median(errors) for ranks, errors in sorted(found.items())}


def measure(
    ranks: Sequence[int] = tuple(RANKS), sizes: Sequence[int] = SIZES, repeats: int = 9
) -> list[Sample]:
    """Time all-reduces of ``sizes`` bytes over the first 2, 3, ... of the ranks on this machine."""
    found = launch(measure_on_rank, ranks, sizes, repeats, nprocs=max(ranks), timeout=300.0)
    # An all-reduce takes as long as it takes the slowest rank; of several, the median.
    return [
        Sample(n, size, median(map(max, zip(*(r[n, size] for r in found[:n]), strict=True))))
        for n in ranks
        for size in sizes
    ]


def measure_on_rank(
    ranks: Sequence[int], sizes: Sequence[int], repeats: int
) -> dict[tuple[int, int], list[float]]:
    """This rank's seconds for every number of ranks and size, one for each repetition."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for n in ranks:
        group = dist.new_group(list(range(n)))
        if dist.get_rank() < n:
            for size in sizes:
                tensor = torch.zeros(size // 4)
                dist.all_reduce(tensor, group=group)
                seconds[n, size] = [seconds_of(tensor, group) for _ in range(repeats)]
        dist.barrier()  # those who are not in the group wait without using the processor
    return seconds


def seconds_of(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds of one all-reduce that all ranks start at about the same time."""
    dist.barrier(group)
    start = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    return time.perf_counter() - start


def table(samples: Sequence[Sample], network: Network) -> str:
    """Measured beside modelled, milliseconds, with the error, for every number of ranks."""
    lines = [f"{'ranks':>5} {'bytes':>10} {'measured ms':>12} {'model ms':>9} {'error':>7}"]
    for s in samples:
        modelled = 1e3 * all_reduce_seconds(s.nbytes, s.ranks, network)
        error = f"{100 * relative_error(s, network):+.0f} %"
        lines.append(
            f"{s.ranks:5} {s.nbytes:10,} {1e3 * s.seconds:12.3f} {modelled:9.3f} {error:>7}"
        )
    lines.append("")
    lines.append(f"fitted: alpha {1e6 * network.alpha:.1f} microseconds, ")
    lines[-1] += f"beta {network.beta / 1e9:.2f} GB/s"
    for ranks, error in errors_by_ranks(samples, network).items():
        lines.append(f"{ranks} ranks: median error {100 * error:.0f} %")
    return "\n".join(lines)


if __name__ == "__main__":
    samples = measure()
    print(table(samples, fit(samples)))
