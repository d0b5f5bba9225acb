"""The journal of a rank: what it does, what it starts, and whether it still works.

A rank prints its journal line by line, so that it is there even if the process crashes or hangs;
``launch`` hands the lines over, and the engine reads them.

Whether a rank is stuck is told from the processor time of its main thread, not from the clock
alone: on a machine with a lot else to do a right wrapper is slow, but it works whenever it can.
"""

import contextlib
import io
import json
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MARK = "\x1eddp_teach "  # what a rank's lines for the journal begin with
LINE = re.compile(r"^\[rank (\d+)\] ?(.*)$")
PULSE = 0.1  # seconds between two looks at the processor time
STILL = 0.7  # seconds without work in which a rank clearly waits for something
BUSY = 1.0  # seconds of work without a word: a loop; a right wrapper needs milliseconds


def write(entry: dict[str, Any]) -> None:
    """In a rank: print a line of the journal."""
    stamp = {"time": time.time(), "worked": worked()}
    os.write(1, f"{MARK}{json.dumps(entry | stamp)}\n".encode())


def worked() -> float:
    """Seconds of processor time that the main thread has had; on systems that don't tell, that of
    the process."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.process_time()
    clock = time.pthread_getcpuclockid(threading.main_thread().ident)
    return time.clock_gettime(clock)


class Said(io.TextIOBase):
    """Where the learner's own ``print`` writes, so that it can be told from what C++ prints."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                write({"said": line})
        return len(text)


@contextlib.contextmanager
def pulse():
    """While entered, the journal tells every ``PULSE`` seconds how much the rank has worked."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(PULSE):
            write({"pulse": True})

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass
class Journal:
    """What one rank said: in which probe it is, what it does in it, the collectives started."""

    probe: int = 0
    doing: str = "starting"
    advice: str = ""
    started: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)  # all that it did and started, in order
    printed: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))  # by probe
    stamps: list[tuple[float, float]] = field(default_factory=list)  # time and work, of the last
    # word and of every pulse since

    def read(self, entry: dict[str, Any]) -> None:
        """Take in one line."""
        if "pulse" not in entry:
            self.stamps = []
        self.stamps.append((entry["time"], entry["worked"]))
        if "probe" in entry:
            self.probe, self.started, self.story = entry["probe"], [], []
        elif "started" in entry:
            self.started.append(entry["started"])
            self.story.append(entry["started"])
        elif "said" in entry:
            self.printed[self.probe].append(entry["said"])
        elif "doing" in entry:
            self.doing, self.advice = entry["doing"], entry["advice"]
            self.story.append(self.doing)

    def waits(self) -> bool:
        """Whether the rank has long said nothing and done nothing."""
        if not self.stamps:
            return False
        now, work = self.stamps[-1]
        before = [done for when, done in self.stamps if when <= now - STILL]
        return bool(before) and work - before[-1] < STILL / 20

    def loops(self) -> bool:
        """Whether the rank works hard, but has long said nothing."""
        return bool(self.stamps) and self.stamps[-1][1] - self.stamps[0][1] > BUSY


def stuck(journals: Sequence[Journal]) -> bool:
    """Whether the ranks would never have come to an end: all wait, or one is in a loop."""
    return all(journal.waits() for journal in journals) or any(j.loops() for j in journals)


def read_journals(text: str, world_size: int) -> list[Journal]:
    """Every rank's journal, from all that they have printed."""
    journals = [Journal() for _ in range(world_size)]
    for line in text.split("\n"):
        if not (parts := LINE.match(line)):
            continue
        _, mark, entry = parts[2].partition(MARK)
        if mark:
            with contextlib.suppress(json.JSONDecodeError):  # cut off: too much was printed
                journals[int(parts[1])].read(json.loads(entry))
    return journals
