"""What runs inside a rank: join the process group, call the function, hand over what came of it.

A rank and the process that launched it share a private folder and a connection. In the folder lie
the call and, for every rank, its printed text and its result or failure. Over the connection the
rank says how far it is, answers the question where it stands, and notices when the launching
process is gone.
"""

import contextlib
import datetime
import multiprocessing
import os
import pickle
import random
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from ddp_teach.call import loads, pack_result
from ddp_teach.ending import end_all_ranks, ending, tell, watch_for_death
from ddp_teach.folder import write
from ddp_teach.hang_report import where

RUNNING, RETURNED, WHERE, DONE = b"running", b"returned", b"where", b"done"  # over the connection


def main(
    rank: int,
    world_size: int,
    folder: Path,
    launcher: Connection,
    environ: dict[str, str],
    timeout: float,
) -> None:
    """Run the call in ``folder`` as one rank of ``world_size``; return when all ranks are done.

    A rank that fails leaves a record of its exception and ends with exit code 1.
    """
    if not folder.exists():  # the launch was interrupted before this process had started
        return
    set_environment(environ, rank, world_size)
    redirect_output(folder / f"{rank}.out")
    watch_for_death(rank, folder)
    answering = threading.Thread(
        target=answer, args=(launcher, threading.get_ident(), folder), daemon=True
    )
    answering.start()
    try:
        run_call(rank, world_size, folder, launcher, timeout)
    except BaseException as error:
        with ending:
            write(folder / f"{rank}.failure", pickle.dumps(describe(error)))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # at once: the others' connections break, and that wakes them
    answering.join()  # until all are done: others may still need this rank's connections
    with contextlib.suppress(Exception):  # fn may have ended the group itself
        dist.destroy_process_group()


def run_call(
    rank: int, world_size: int, folder: Path, launcher: Connection, timeout: float
) -> None:
    """Join the process group, run the call, leave its result in the folder and say so."""
    torch.set_num_threads(1)  # ranks share the cores
    multiprocessing.set_start_method(None, force=True)  # the usual one for a DataLoader's workers
    for seed in torch.manual_seed, numpy.random.seed, random.seed:  # forked, all would be equal
        seed(rank)
    with ending:  # torch would wait minutes for a folder that is gone, and let no other thread run
        store = dist.FileStore(str(folder / "store"), world_size)
    patience = datetime.timedelta(seconds=min(timeout + 60, 1e8))  # the launcher's comes first
    init_process_group(store=store, rank=rank, world_size=world_size, timeout=patience)
    store.set(f"ready {rank}", "")
    # No rank may run ahead: if it fails at once, others are still connecting, and gloo complains.
    store.wait([f"ready {r}" for r in range(world_size)], patience)
    fn, args, kwargs = loads((folder / "call").read_bytes())
    tell(launcher, RUNNING, folder)
    write(folder / f"{rank}.result", pack_result(fn(*args, **kwargs)))
    tell(launcher, RETURNED, folder)


def set_environment(environ: dict[str, str], rank: int, world_size: int) -> None:
    """The launcher's environment as it is now, what torchrun would add, and loopback only."""
    os.environ.clear()
    os.environ.update(environ)
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # torchrun did not start this rank
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    interfaces = [name for _, name in socket.if_nameindex()]
    for loopback in {"lo", "lo0"}.intersection(interfaces):  # as Linux and macOS call it
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)


def redirect_output(path: Path) -> None:
    """From here on everything printed, by Python or by C++, goes to the file ``path``."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = os.fdopen(number, "w", 1, "utf-8", "backslashreplace", closefd=False)
        setattr(sys, name, stream)
    # The path in front of a warning differs from machine to machine.
    warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"


def init_process_group(**rendezvous: Any) -> None:
    """Initialise the default group: gloo for tensors on the CPU, nccl for those on a GPU."""
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl", **rendezvous)
    else:
        dist.init_process_group("gloo", **rendezvous)


def describe(error: BaseException) -> dict[str, Any]:
    """What the launcher has to know about an exception, in plain types."""
    steps = traceback.walk_tb(error.__traceback__)
    return {
        "error": "".join(traceback.format_exception_only(error)).strip(),
        "frames": [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in steps],
        "traceback": "".join(traceback.format_exception(error)),
        "lost_connection": any(map(lost_connection, chain(error))),
    }


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def lost_connection(error: BaseException) -> bool:
    """Whether the error says that another rank is gone: then that rank has more to tell."""
    kinds = (ConnectionError, dist.DistNetworkError, dist.DistBackendError)
    text = "".join(traceback.format_exception_only(error))  # str() may raise
    return isinstance(error, kinds) or tells_of_lost_connection(text)


def tells_of_lost_connection(text: str) -> bool:
    """Whether gloo, the network library of ranks on the CPU, says that another rank is gone."""
    # a failed check is the first to notice that ranks run different collectives
    return "gloo/transport" in text and "enforce fail" not in text


def answer(launcher: Connection, thread: int, folder: Path) -> None:
    """Say where ``thread`` stands whenever asked, until all ranks are done.

    If the launching process dies, nobody is left to end the ranks and to remove the folder.
    """
    try:
        while launcher.recv_bytes() != DONE:
            launcher.send(where(thread, until=__file__))
    except (EOFError, OSError):
        end_all_ranks(folder)
