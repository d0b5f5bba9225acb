"""One rank as the launching process sees it: started, listened to, its text printed."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from functools import cache
from multiprocessing import util
from pathlib import Path

from ddp_teach.folder import write
from ddp_teach.rank import RETURNED, RUNNING, main

# Ranks are forked from a server that has imported this already. Not from this process: a fork of a
# process that has threads (any large CPU operation, CUDA) can hang. Not this package: a change of
# its source must show in the next launch.
START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "cloudpickle"]  # dynamo: for optimizers
MOST_OUTPUT = 2**20  # bytes of text that are shown per rank

one_start_at_a_time = threading.Lock()


class RankProcess:
    """One rank as the launching process sees it."""

    def __init__(self, number: int, folder: Path):
        self.number, self.folder = number, folder
        self.connection, self.theirs = multiprocessing.Pipe()
        self.process: multiprocessing.process.BaseProcess | None = None
        self.running = self.returned = self.died = False
        self.stands: dict | None = None  # its answer to the question where it stands
        self.shown = 0  # bytes of its text

    def file(self, kind: str) -> Path:
        """The rank's file of this kind in the folder that it shares with this process."""
        return self.folder / f"{self.number}.{kind}"

    def text(self, kind: str) -> str:
        """What that file says; empty if there is none."""
        path = self.file(kind)
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def start(self, world_size: int, timeout: float) -> None:
        """Start the process."""
        if START_METHOD == "forkserver":
            write(self.folder / "server.pid", str(start_server()).encode())
        context = multiprocessing.get_context(START_METHOD)
        environ = dict(os.environ)
        self.process = context.Process(
            target=main,
            args=(self.number, world_size, self.folder, self.theirs, environ, timeout),
        )
        with one_start_at_a_time, nameless_main():
            self.process.start()
        self.theirs.close()

    def ask(self, message: bytes) -> None:
        """Send a message, if the rank is still there."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)

    def listen(self) -> None:
        """Take note of what the rank has said, and of its death."""
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll():
                message = self.connection.recv_bytes()
                self.running = self.running or message == RUNNING
                self.returned = self.returned or message == RETURNED
                if message not in (RUNNING, RETURNED):
                    self.stands = pickle.loads(message)
        self.died = not self.process.is_alive()

    def print_output(self, ended: bool = True) -> None:
        """Print what the rank has printed since the last time: whole lines, until it has ended."""
        if not self.file("out").exists():
            return
        with self.file("out").open("rb") as file:
            file.seek(self.shown)
            text = file.read(MOST_OUTPUT - self.shown)
            unseen = file.seek(0, os.SEEK_END) - MOST_OUTPUT
        if not ended:
            text = text[: text.rfind(b"\n") + 1]
        self.shown += len(text)
        lines = text.decode("utf-8", "replace").removesuffix("\n").split("\n") if text else []
        if ended and unseen > 0:
            lines.append(f"... and {unseen} bytes more")
        for line in lines:  # of a progress bar, which goes back to the start of its line, the end
            print(f"[rank {self.number}] {line.rstrip().rpartition(chr(13))[2]}".rstrip())


def start_server() -> int:
    """Start the server that ranks are forked from, unless it runs; it does not hear interrupts.

    Returns its process id.
    """
    from multiprocessing import forkserver, resource_tracker  # not on Windows

    forkserver.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # the server would start it, and lift the block below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    end_server_at_exit()
    return forkserver._forkserver._forkserver_pid


@cache
def end_server_at_exit() -> None:
    """Have the server end when this process does; by itself it takes seconds, with torch in it."""
    from multiprocessing import forkserver

    def end_server() -> None:
        pid = forkserver._forkserver._forkserver_pid
        if pid is not None:
            with contextlib.suppress(OSError):  # it has ended already
                os.kill(pid, signal.SIGKILL)

    util.Finalize(None, end_server, exitpriority=-1)  # when multiprocessing has joined its children


@contextlib.contextmanager
def nameless_main() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script once more in every rank."""
    known = vars(sys.modules["__main__"])
    names = {name: known.pop(name) for name in ("__file__", "__spec__") if name in known}
    known["__spec__"] = None
    try:
        yield
    finally:
        known.update(names)
