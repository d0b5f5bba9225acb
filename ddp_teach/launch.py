"""Run a function on several ranks, from a notebook, a script or torchrun."""

import atexit
import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_teach import rank as inside
from ddp_teach.failures import LaunchError, LaunchTimeout, first_failure, standings
from ddp_teach.launch_arguments import check_arguments, pack_call

START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
# What nearly every rank imports sooner or later; an optimizer imports torch._dynamo.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "cloudpickle", "ddp_teach.rank"]
START_LIMIT = 60.0  # seconds until all ranks have to be running
starting = threading.Lock()


def launch(
    fn: Callable,
    *args: Any,
    nprocs: int = 2,
    timeout: float = 60.0,
    live: bool = False,
    **kwargs: Any,
) -> list:
    """Run ``fn(*args, **kwargs)`` on ``nprocs`` ranks and return their results in rank order."""
    check_arguments(fn, args, kwargs, nprocs, timeout, live)
    call = pack_call(fn, args, kwargs)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return call_under_torchrun(call, nprocs)
    folder = Path(tempfile.mkdtemp(prefix="ddp_teach-"))
    ranks: list[Rank] = []
    try:
        (folder / "call").write_bytes(call)
        try:
            start(ranks, nprocs, folder, timeout)
            watch(ranks, timeout, live)
        finally:
            end(ranks)
            for rank in ranks:
                rank.print_output(everything=True)
        return [inside.loads(rank.file("result").read_bytes()) for rank in ranks]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Rank:
    """The launching process's view of one rank."""

    def __init__(self, number: int, world_size: int, folder: Path, timeout: float):
        self.number, self.folder = number, folder
        self.running = self.returned = False
        self.died: float | None = None  # when, by time.monotonic()
        self.standing: dict | None = None
        self.printed, self.line = 0, ""
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context(START_METHOD)
        if START_METHOD == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        environ = dict(os.environ)
        self.process = context.Process(
            target=inside.main, args=(number, world_size, folder, theirs, environ, timeout)
        )
        with theirs, hidden_main():
            self.process.start()

    def file(self, kind: str) -> Path:
        return self.folder / f"{self.number}.{kind}"

    def listen(self) -> None:
        """Take note of what the rank has said, and of its end."""
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                message = self.connection.recv_bytes()
                if message == inside.RUNNING:
                    self.running = True
                elif message == inside.RETURNED:
                    self.returned = True
                else:
                    self.standing = inside.pickle.loads(message)
        if self.died is None and not self.process.is_alive():
            self.died = time.monotonic()

    def print_output(self, everything: bool = False) -> None:
        """Print the lines that are new; ``everything``: an unfinished last line as well."""
        try:
            with self.file("out").open("rb") as file:
                file.seek(self.printed)
                data = file.read()
        except FileNotFoundError:
            return
        if not everything:
            data = data[: data.rfind(b"\n") + 1]
        self.printed += len(data)
        for line in data.decode("utf-8", "replace").splitlines():
            print(f"[rank {self.number}] {line}".rstrip())


def start(ranks: list[Rank], nprocs: int, folder: Path, timeout: float) -> None:
    for number in range(nprocs):
        ranks.append(Rank(number, nprocs, folder, timeout))


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every rank."""
    with starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def watch(ranks: list[Rank], timeout: float, live: bool) -> None:
    """Wait until every rank has returned; raise when one fails or time is up."""
    now = time.monotonic()
    deadline, started = now + START_LIMIT, False
    while not all(rank.returned for rank in ranks):
        busy = [rank for rank in ranks if not rank.returned]
        left = deadline - time.monotonic()
        waited = min(max(left, 0), 0.05 if live else 1.0)
        connection.wait([x for r in busy for x in (r.connection, r.process.sentinel)], waited)
        for rank in busy:
            rank.listen()
            if live:
                rank.print_output()
        if any(rank.died and not rank.returned for rank in ranks):
            raise first_failure(ranks)
        if not started and all(rank.running for rank in ranks):
            started, deadline = True, time.monotonic() + timeout
        if time.monotonic() >= deadline and not all(rank.returned for rank in ranks):
            raise standings(ranks, timeout if started else START_LIMIT)


def end(ranks: list[Rank]) -> None:
    """End every rank: those that have returned by themselves, the others by signals."""
    done = all(rank.returned for rank in ranks)
    try:
        for rank in ranks:
            if done:
                with contextlib.suppress(OSError):
                    rank.connection.send_bytes(inside.DONE)
            else:
                rank.process.terminate()
        wait_until_dead(ranks, 2.0 if done else 0.5)
    finally:
        for rank in ranks:
            rank.process.kill()
        wait_until_dead(ranks, 5.0)
        for rank in ranks:
            rank.connection.close()
            with contextlib.suppress(ValueError):
                rank.process.close()


def wait_until_dead(ranks: list[Rank], seconds: float) -> None:
    until = time.monotonic() + seconds
    for rank in ranks:
        rank.process.join(max(until - time.monotonic(), 0))


def call_under_torchrun(call: bytes, nprocs: int) -> list:
    """Run the call on this rank, one of those that torchrun started; return all ranks' results."""
    if not dist.is_initialized():
        inside.join_process_group()
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    if nprocs != dist.get_world_size() and dist.get_rank() == 0:
        print(f"launch: torchrun started {dist.get_world_size()} ranks; nprocs={nprocs} is ignored")
    fn, args, kwargs = inside.loads(call)
    results = [b""] * dist.get_world_size()
    dist.all_gather_object(results, inside.dumps_result(fn(*args, **kwargs)))
    return [inside.loads(result) for result in results]


__all__ = ["LaunchError", "LaunchTimeout", "launch"]
