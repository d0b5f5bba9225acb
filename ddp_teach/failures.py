"""What went wrong on which rank, told in a few lines at the reader's level."""

import pickle
import re
import signal
import time
from typing import TYPE_CHECKING

from ddp_teach.hang_report import hang_report
from ddp_teach.rank import WHERE, tells_of_lost_connection
from ddp_teach.stacks import Frame, readers, short_name, stack

if TYPE_CHECKING:
    from ddp_teach.rank_process import RankProcess

ANSWER_LIMIT = 3.0  # seconds for ranks to say where they stand
FOLLOW_LIMIT = 1.0  # seconds for ranks to fail after another has
SOURCE_LINE = re.compile(r"^\[[^\]]*\] ")  # of C++ that nobody here has
CRASHED_IN = re.compile(r'File "(.+?)", line (\d+) in (\S+)')  # as faulthandler writes it
LAST_WORDS = re.compile(r"^  what\(\):  (.*)", re.MULTILINE)  # of a C++ exception nobody caught
OWN_REASON, NO_WORDS, LOST_CONNECTION = range(3)  # why a rank failed; the lowest tells the cause


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


def failure(rank: "RankProcess") -> tuple[int, LaunchError]:
    """Why a dead rank failed, and its error.

    One that C++ has aborted without a word may have lost a connection; one that says so has.
    """
    code = rank.process.exitcode
    name = f"rank {rank.number}"
    if rank.file("failure").exists():
        told = pickle.loads(rank.file("failure").read_bytes())
        message = f"{name} raised {told['error']}{stack(readers(told['frames']), short_name)}"
        why = LOST_CONNECTION if told["lost_connection"] else OWN_REASON
        return why, LaunchError(message, rank.number, code, told["traceback"])
    if code < 0:
        message = f"{name} was ended by {signal_name(-code)}"
    else:
        message = f"{name} exited with code {code} before its function returned"
    aborted = code == -signal.SIGABRT  # most often C++ that gives up
    words = LAST_WORDS.findall(rank.text("out")) if aborted else []
    message += f"\n  C++ said: {SOURCE_LINE.sub('', words[-1])}" if words else ""
    crash = rank.text("crash")
    message += stack(readers(crash_frames(crash)), short_name)
    why = NO_WORDS if aborted and not words else OWN_REASON
    why = LOST_CONNECTION if words and tells_of_lost_connection(words[-1]) else why
    return why, LaunchError(message, rank.number, code, crash)


def crash_frames(crash: str) -> list[Frame]:
    """The stack of the function that was launched, outermost call first, from what Python's
    faulthandler has written about all threads; its own order is the other way round."""
    called = crash.partition(" in run_call\n")[0].rpartition("(most recent call first)")[2]
    return [(file, int(line), name) for file, line, name in CRASHED_IN.findall(called)][::-1]


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
    while any(rank.stands is None for rank in ranks) and time.monotonic() < until:
        time.sleep(0.01)
        for rank in ranks:
            rank.listen()
    message, stacks = hang_report(ranks)
    return LaunchTimeout(f"not all ranks {what} within {seconds:g} s\n{message}", traceback=stacks)
