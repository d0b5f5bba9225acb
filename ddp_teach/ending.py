"""The end of the ranks whose launching process is gone: nobody else is left to see to it.

A rank notes its process id in the folder that all share. One that finds the launching process gone,
while it speaks to it or listens, ends them all and removes the folder.
"""

import contextlib
import faulthandler
import os
import signal
import threading
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path

from ddp_teach.folder import remove, write

ending = threading.Lock()  # held by the thread that is about to end this process


def watch_for_death(rank: int, folder: Path) -> None:
    """Note the process id; should the process crash, note its stack; let an interrupt end it."""
    write(folder / f"{rank}.pid", str(os.getpid()).encode())  # another rank may read it right now
    if (folder / "ending").exists() or not folder.exists():
        os._exit(1)  # who ends all ranks may have looked for process ids before
    crash = os.open(folder / f"{rank}.crash", os.O_WRONLY | os.O_CREAT, 0o600)
    faulthandler.enable(crash)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would wait for a collective's end
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def tell(launcher: Connection, message: bytes, folder: Path) -> None:
    """Say how far this rank is; if the launching process is gone, end all."""
    try:
        launcher.send_bytes(message)
    except OSError:
        end_all_ranks(folder)


def end_all_ranks(folder: Path) -> None:
    """End the other ranks, even stopped ones, and the server that they were forked from, which by
    itself takes seconds to end, with all of torch in it; remove both folders, and end this process.

    Only one rank does this: two could end each other before either had removed the folder.
    """
    with ending:  # this rank fails as soon as it loses its connections to the others
        try:
            (folder / "ending").touch(exist_ok=False)
            for pid in [int(file.read_text()) for file in folder.glob("*.pid")]:
                if pid != os.getpid():
                    with contextlib.suppress(OSError):  # it has ended by itself
                        os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            # In one step: a rank that has just begun finds either "ending" there, or no folder.
            for left in folder.rename(f"{folder}-ended"), util.get_temp_dir():  # the server's
                remove(left)
        finally:
            os._exit(1)
