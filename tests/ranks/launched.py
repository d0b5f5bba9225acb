"""Functions that the tests of launch run on ranks; few imports, because every rank does them."""

import glob
import os
import random
import subprocess
import sys
import time
import warnings

import numpy as np
import psutil
import torch
import torch.distributed as dist
from processes import wait_for

from ddp_teach import rank
from ddp_teach.launch import launch


def sum_of_ranks(factor=1, *, shift=0):
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item() * factor + shift


def surroundings():
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RUN_ID",
        "CHANGED",
    )
    env = {name: os.environ.get(name) for name in names}
    return env, os.getcwd(), torch.get_num_threads(), dist.get_backend()


def addresses_in_use(launcher):
    """What the launching process and all processes below it listen on or are connected from."""
    subgroup = dist.new_group([0, 1])  # has connections of its own
    dist.all_reduce(torch.ones(1), group=subgroup)
    dist.barrier()
    process = psutil.Process(launcher)
    in_use = {p.pid: addresses(p) for p in [process, *process.children(recursive=True)]}
    dist.barrier()
    return os.getpid(), in_use


def addresses(process):
    connections = getattr(process, "net_connections", process.connections)(kind="inet")
    return {connection.laddr.ip for connection in connections}


def modes(pattern):
    """Who may do what with the files of that pattern."""
    return [oct(os.stat(path).st_mode & 0o777) for path in glob.glob(pattern)]


def draws():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model


def big():
    rows = torch.full((1000, 5000), dist.get_rank() + 1.0)
    return {"all": rows, "some": rows[:2], "note": "by value"}


def product(size):
    return (
        (torch.ones(size, size, dtype=torch.float64) @ torch.ones(size, size, dtype=torch.float64))
        .sum()
        .item()
    )


def nested():
    return launch(sum_of_ranks, timeout=90)


def talk():
    rank = dist.get_rank()
    print("one", rank)
    print("two", rank, file=sys.stderr)
    os.write(1, b"from C\n\n")
    subprocess.run(["echo", "from a child"], check=True)
    warnings.warn("careful", stacklevel=1)
    print(" 10%\r 100%", end="\r\n")
    print("ünïcödé", end="")


def talk_and_fail():
    print("before it failed")
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def wait_for_a_file_for(path, seconds):
    print("ready")
    return wait_for(path.exists, seconds)


def print_a_lot():
    for i in range(200_000):
        print("line", i)


def fail_on_ten(i):
    dist.barrier()
    if i % 10 == 9 and dist.get_rank() == 0:
        raise ValueError("on purpose")


def second_rank_is_late(number, *rest):
    """As ``rank.main``, but after it has joined the group, rank 1 takes its time."""
    joined = rank.init_process_group

    def slow(**rendezvous):
        joined(**rendezvous)
        time.sleep(0.3 * number)
        os.environ["READY_AT"] = str(time.monotonic())

    rank.init_process_group = slow
    rank.main(number, *rest)


def when_ready_and_when_run():
    return float(os.environ["READY_AT"]), time.monotonic()
