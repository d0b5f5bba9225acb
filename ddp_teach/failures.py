"""What went wrong on which rank, told in a few lines at the reader's level."""

import linecache
import pickle
import signal
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddp_teach.rank import WHERE

if TYPE_CHECKING:
    from ddp_teach.launch import Rank

LIBRARIES = tuple(
    {str(Path(torch.__file__).parent), str(Path(__file__).parent)}
    | {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class LaunchError(RuntimeError):
    """A rank failed. ``rank``: which one; ``exitcode``: of its process; ``traceback``: all of it."""

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        exitcode: int | None = None,
        traceback: str = "",
    ):
        super().__init__(message)
        self.rank, self.exitcode, self.traceback = rank, exitcode, traceback

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message alone."""
        return [f"{type(self).__name__}: {self}"]


class LaunchTimeout(LaunchError, TimeoutError):
    """The ranks took longer than ``timeout``."""


def first_failure(ranks: list["Rank"]) -> LaunchError:
    """The error for the rank that failed first, not for those that only lost their connection."""
    until = time.monotonic() + 1.0
    while True:
        for rank in ranks:
            rank.listen()
        failures = [failure(rank) for rank in ranks if rank.died and not rank.returned]
        first = min(failures, key=lambda f: (f["lost_connection"], f["time"]))
        if not first["lost_connection"] or time.monotonic() > until:
            return LaunchError(
                first["message"], first["rank"], first["exitcode"], first["traceback"]
            )
        time.sleep(0.01)


def failure(rank: "Rank") -> dict[str, Any]:
    code = rank.process.exitcode
    if rank.file("failure").exists():
        record = pickle.loads(rank.file("failure").read_bytes())
        record["message"] = f"rank {rank.number} raised {record['what']}" + stack(record["frames"])
    else:
        end = f"exited with code {code} before it returned"
        if code is not None and code < 0:
            end = f"was ended by {signal_name(-code)}"
        crash = rank.file("crash")
        record = {"time": rank.died, "lost_connection": False}
        record["message"] = f"rank {rank.number} {end}"
        record["traceback"] = crash.read_text() if crash.exists() else ""
    return record | {"rank": rank.number, "exitcode": code}


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def standings(ranks: list["Rank"], seconds: float) -> LaunchTimeout:
    """The error for a launch whose time is up: where every rank stands."""
    for rank in ranks:
        if not rank.returned:
            rank.connection.send_bytes(WHERE)
    until = time.monotonic() + 1.0
    while time.monotonic() < until and any(not r.returned and not r.standing for r in ranks):
        time.sleep(0.01)
        for rank in ranks:
            rank.listen()
    lines = [f"not all ranks returned within {seconds:g} s:"]
    lines += [f"rank {rank.number} {standing(rank)}" for rank in ranks]
    return LaunchTimeout("\n".join(lines))


def standing(rank: "Rank") -> str:
    if rank.returned:
        return "has returned"
    if rank.standing is None:
        return "does not answer: it is stopped, or busy outside Python"
    text = "is here:" if rank.running else "is still starting:"
    if rank.standing["waits_for"]:
        text = f"waits for {rank.standing['waits_for']}:"
    return text + stack(rank.standing["frames"])


def stack(frames: list[tuple[str, int, str]]) -> str:
    """The reader's own part of a stack, as in a traceback; all of it if there is none."""
    own = [frame for frame in frames if not frame[0].startswith((*LIBRARIES, "<frozen"))]
    text = ""
    for filename, number, function in own or frames:
        text += f"\n  {place(filename)}, line {number}, in {function}"
        source = linecache.getline(filename, number).strip()
        text += f"\n    {source}" if source else ""
    return text


def place(filename: str) -> str:
    """A notebook cell by its number, a file by its name: never a path of this machine."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    label = shell.compile.format_code_name(filename) if shell else None
    return " ".join(label) if label else Path(filename).name
