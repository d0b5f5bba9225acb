"""Run a function on several ranks, from a notebook, a script or torchrun.

def total():
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()

launch(total, nprocs=2)  # [3.0, 3.0]
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401, later it would hold on to the default group

from ddp_teach.call import check_arguments, loads, one_line, pack, pack_result
from ddp_teach.failures import LaunchError, LaunchTimeout, first_cause, out_of_time
from ddp_teach.rank import DONE, init_process_group
from ddp_teach.rank_process import RankProcess

__all__ = ["LaunchError", "LaunchTimeout", "launch"]

START_LIMIT = 60.0  # seconds until every rank runs
TORCHRUN = {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def launch(
    fn: Callable,
    /,
    *args: Any,
    nprocs: int = 2,
    timeout: float = 60.0,
    live: bool = False,
    **kwargs: Any,
) -> list:
    """Run ``fn(*args, **kwargs)`` on ``nprocs`` ranks; return their results in rank order.

    Every rank is a process of its own with a process group ready: ``fn`` uses
    ``torch.distributed``, with gloo for tensors on the CPU and, where every rank can have a GPU of
    its own, nccl for those on a GPU. ``fn`` may come from a notebook cell or a script; no
    ``if __name__ == "__main__"`` is needed. (An argument of ``fn`` that is called ``nprocs``,
    ``timeout`` or ``live`` goes through ``functools.partial``.)

    Arguments and results are copies. A module that is passed in is trained in the ranks, not here:
    return what you need of it. Tensors arrive on the CPU, both ways. The random numbers of torch,
    numpy and ``random`` start from the rank as their seed: different on every rank, the same in
    every launch. Environment variables and the working directory are those of this process.

    What ranks print is shown when all have ended, in rank order, each line after ``[rank 0]``;
    with ``live=True`` as it comes.

    Under ``torchrun`` the same call joins the ranks that torchrun started: it runs ``fn`` on this
    process, with these very arguments, and returns the results of all. How many ranks there are,
    when they are given up and where their text goes is then torchrun's to decide; ``nprocs``,
    ``timeout`` and ``live`` have no effect.

    Raises:
        LaunchError: a rank raised, exited or was killed. It tells which was first, and why.
        LaunchTimeout: not all ranks returned within ``timeout`` seconds, counted from when all had
            started. It tells where every rank stood.
        TypeError, ValueError: an argument can't be used; no process was started.

    In each case no rank is left running.
    """
    check_arguments(fn, args, kwargs, nprocs, timeout, live)
    if os.environ.keys() >= TORCHRUN:
        return run_under_torchrun(partial(fn, *args, **kwargs), nprocs)
    call = pack(fn, args, kwargs)
    # A folder that only this user can read: what comes back through it is unpickled.
    folder = Path(tempfile.mkdtemp(prefix=f"ddp_teach-{os.getpid()}-"))
    ranks: list[RankProcess] = []
    try:
        (folder / "call").write_bytes(call)
        try:
            for number in range(nprocs):
                ranks.append(RankProcess(number, folder))
                ranks[-1].start(nprocs, timeout)
            watch(ranks, timeout, live)
        finally:
            end(ranks)
            for rank in ranks:
                rank.print_output()
        return unpack([rank.file("result").read_bytes() for rank in ranks])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpack(results: list[bytes]) -> list:
    """What the ranks returned; raise LaunchError naming one whose result can't be unpickled."""
    values = []
    for rank, result in enumerate(results):
        try:
            values.append(loads(result))
        except Exception as error:
            what = f"{type(error).__name__}: {one_line(error)}"
            message = f"what rank {rank} returned can't be unpickled here: {what}"
            raise LaunchError(message, rank) from error
    return values


def watch(ranks: list[RankProcess], timeout: float, live: bool) -> None:
    """Wait until every rank has returned; raise once one has failed or time is up."""
    events = [event for rank in ranks for event in (rank.connection, rank.process.sentinel)]
    goal, limit = "were running", START_LIMIT
    deadline = time.monotonic() + limit
    while not all(rank.returned for rank in ranks):
        if time.monotonic() >= deadline:
            raise out_of_time(ranks, goal, limit)
        left = max(deadline - time.monotonic(), 0)
        connection.wait(events, min(left, 0.05 if live else 1.0))
        for rank in ranks:
            rank.listen()
            if live:
                rank.print_output(ended=False)
        if any(rank.died for rank in ranks):
            raise first_cause(ranks)
        if goal != "returned" and all(rank.running for rank in ranks):
            goal, limit = "returned", timeout
            deadline = time.monotonic() + limit


def end(ranks: list[RankProcess]) -> None:
    """End every rank, by itself if all have returned, else by signals; leave nothing open."""
    processes = [rank.process for rank in ranks if rank.process and rank.process.pid]
    try:
        if all(rank.returned for rank in ranks):
            for rank in ranks:
                rank.ask(DONE)
        else:
            for process in processes:
                process.terminate()
        join(processes, seconds=0.5)
    finally:  # even if interrupted once more
        for process in processes:
            process.kill()
        for rank in ranks:
            rank.connection.close()
            rank.theirs.close()
        join(processes, seconds=5.0)
        for process in processes:
            with contextlib.suppress(ValueError):  # it lives on, in the middle of a system call
                process.close()


def join(processes: list[multiprocessing.process.BaseProcess], seconds: float) -> None:
    """Wait until all processes have ended, for so many seconds at most."""
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(until - time.monotonic(), 0))


def run_under_torchrun(call: Callable[[], Any], nprocs: int) -> list:
    """Run the call on this rank, one of those that torchrun started; return all ranks' results."""
    if not dist.is_initialized():
        init_process_group()
        atexit.register(leave)
    world_size = dist.get_world_size()
    if nprocs != world_size and dist.get_rank() == 0:
        print(f"launch: torchrun started {world_size} ranks, so nprocs={nprocs} has no effect")
    results = [b""] * world_size
    dist.all_gather_object(results, pack_result(call(), pickle.Pickler))
    return unpack(results)


def leave() -> None:
    """End the process group and its threads while Python still runs.

    A thread of gloo that lets go of its last collective after that aborts the process (pytorch
    issue 190489). The group ends its threads when nobody refers to it any more.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # wrapped models refer to it
