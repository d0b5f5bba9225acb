"""What a launch may leave behind, looked up in the operating system."""

import contextlib
import glob
import os
import signal
import tempfile
import time

import psutil

SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # stay, for speed


def ranks_below(pid=None):
    """Processes below ``pid`` (this one) that are neither ended nor Python's own servers.

    A rank has the same command line as the server that it was forked from, its own parent.
    """
    try:
        children = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    found = []
    for child in children:
        try:
            server = any(name in " ".join(child.cmdline()) for name in SERVERS)
            found += child.children(recursive=True) if server else [child]
        except psutil.NoSuchProcess:
            continue
    return [process for process in found if is_alive(process.pid)]


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def end_session(pid):
    """End the process and all below it, if a session began with it; some may have ended before."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def wait_for(condition, seconds=20.0):
    """Whether ``condition()`` comes true within so many seconds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def folders():
    """Private folders of this process's launches that are still there."""
    return set(glob.glob(os.path.join(tempfile.gettempdir(), f"ddp_teach-{os.getpid()}-*")))


def folders_in(temporary):
    """Names of folders there that launch made, or the server that ranks are forked from."""
    return [
        path.name for path in temporary.iterdir() if path.name.startswith(("ddp_teach-", "pymp-"))
    ]
