"""What went wrong on which rank, told in a few lines at the reader's level."""

import linecache
import pickle
import re
import signal
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ddp_teach.rank import WHERE

if TYPE_CHECKING:
    from ddp_teach.rank_process import RankProcess

Frame = tuple[str, int, str]  # file name, line number, function name

ANSWER_LIMIT = 3.0  # seconds for ranks to say where they stand
FOLLOW_LIMIT = 1.0  # seconds for ranks to fail after another has
# Whose lines a reader did not write: torch, this package, Python and what is installed in it.
LIBRARIES = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen ",
)
CELL = re.compile(
    r"[/\\]ipykernel_\d+[/\\]|^<ipython-input-"
)  # the names that Jupyter gives to cells


class LaunchError(RuntimeError):
    """A rank failed, and the launch was ended.

    ``rank`` is the one that failed first; ``exitcode`` that of its process, negative for a signal;
    ``traceback`` the whole traceback as text, where there is one.
    """

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
        """What a notebook shows instead of the launching process's own traceback."""
        return [f"{type(self).__name__}: {self}"]


class LaunchTimeout(LaunchError, TimeoutError):
    """Time was up before all ranks had returned; the launch was ended.

    ``rank`` and ``exitcode`` are ``None``; ``traceback`` has the whole stack of every rank.
    """


def first_cause(ranks: list["RankProcess"]) -> LaunchError:
    """The error of the rank that failed for a reason of its own; of several the lowest rank.

    Once a rank has failed, the others lose their connections to it and fail as well, a moment
    later or before anyone has noticed the first. Those that go on for longer have no say.
    """
    until = time.monotonic() + FOLLOW_LIMIT
    while not all(rank.died or rank.returned for rank in ranks) and time.monotonic() < until:
        time.sleep(0.01)
        for rank in ranks:
            rank.listen()
    failures = [failure(rank) for rank in ranks if rank.died]
    return min(failures, key=lambda failed: failed[0])[1]  # the first one of equals


def failure(rank: "RankProcess") -> tuple[bool, LaunchError]:
    """Whether a dead rank most likely failed because another one had, and its error."""
    code = rank.process.exitcode
    name = f"rank {rank.number}"
    if rank.file("failure").exists():
        told = pickle.loads(rank.file("failure").read_bytes())
        message = f"{name} raised {told['error']}{stack(readers(told['frames']), short_name)}"
        return told["lost_connection"], LaunchError(message, rank.number, code, told["traceback"])
    if code < 0:
        message = f"{name} was ended by {signal_name(-code)}"
    else:
        message = f"{name} exited with code {code} before its function returned"
    crash = rank.file("crash").read_text() if rank.file("crash").exists() else ""
    aborted = code == -signal.SIGABRT  # C++ gives up, most often over a lost connection
    return aborted, LaunchError(message, rank.number, code, crash)


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def out_of_time(ranks: list["RankProcess"], what: str, seconds: float) -> LaunchTimeout:
    """The error for a launch whose time is up: where every rank stands."""
    for rank in ranks:
        rank.ask(WHERE)
    until = time.monotonic() + ANSWER_LIMIT
    while any(r.stands is None and not r.returned for r in ranks) and time.monotonic() < until:
        time.sleep(0.01)
        for rank in ranks:
            rank.listen()
    message = f"not all ranks {what} within {seconds:g} s"
    return LaunchTimeout(
        "\n".join([message, *(f"rank {r.number} {standing(r)}" for r in ranks)]),
        traceback="\n".join(
            f"rank {r.number}{stack(r.stands['frames'], str)}" for r in ranks if r.stands
        ),
    )


def standing(rank: "RankProcess") -> str:
    """Where a rank stands: its answer, or that there is none."""
    if rank.returned:
        return "has returned"
    if rank.stands is None:
        return "gives no answer: it is stopped, or held up outside Python"
    state = "is running" if rank.running else "is starting"
    waits_for = rank.stands["waits_for"]
    state = f"waits for {waits_for}" if waits_for else state
    frames = rank.stands["frames"]
    return state + stack(readers(frames) or frames[-1:], short_name)


def readers(frames: list[Frame]) -> list[Frame]:
    """The part of a stack that a reader wrote."""
    return [frame for frame in frames if not frame[0].startswith(LIBRARIES)]


def stack(frames: list[Frame], name: Callable[[str], str]) -> str:
    """A stack as in a traceback, outermost call first, with ``name`` of every file."""
    text = ""
    for filename, line, function in frames:
        source = linecache.getline(filename, line).strip()
        text += f"\n  {name(filename)}, line {line}, in {function}"
        text += f"\n    {source}" if source else ""
    return text


def short_name(filename: str) -> str:
    """A file by its name alone, and a notebook cell as just that: no path of this machine.

    A cell's number is not told: it changes whenever the cell runs again.
    """
    return "notebook cell" if CELL.search(filename) else Path(filename).name
