"""Run probes of a learner's class on real ranks; a crash or a hang is a finding like any other.

Three things may end a launch before its probes are through: the learner's code raises, it waits
for something that never comes, or C++ gives up and takes the process along. What a rank was doing
then, and which collectives it had started, stands in its journal: lines that it has printed, which
``launch`` hands over even from a rank that is gone.
"""

import contextlib
import io
import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ddp_teach.exercises.crash import finding_of
from ddp_teach.exercises.probe import (
    JOURNAL,
    Collectives,
    Finding,
    Learner,
    Probe,
    Said,
    write_journal,
)
from ddp_teach.launch import LaunchError, LaunchTimeout, launch

TIME_LIMIT = 4.0  # seconds for all probes of a launch; they take less than one
QUIET = 2.0  # seconds without a word at its end: stuck, not just slow
SLOW_LIMIT = 30.0  # seconds for a machine that has a lot else to do
LINE = re.compile(r"^\[rank (\d+)\] ?(.*)$")


@dataclass
class Journal:
    """What one rank said: in which probe it is, what it does in it, the collectives started."""

    last_word: float = 0.0  # seconds since the epoch
    probe: int = 0
    doing: str = "starting"
    advice: str = ""
    started: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)  # all that it did and started, in order
    printed: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))  # by probe

    def read(self, entry: dict[str, Any]) -> None:
        """Take in one line."""
        self.last_word = entry["time"]
        if "probe" in entry:
            self.probe, self.started, self.story = entry["probe"], [], []
        elif "started" in entry:
            self.started.append(entry["started"])
            self.story.append(entry["started"])
        elif "said" in entry:
            self.printed[self.probe].append(entry["said"])
        else:
            self.doing, self.advice = entry["doing"], entry["advice"]
            self.story.append(self.doing)


@dataclass(frozen=True)
class Mistake:
    """The probe that failed, on how many ranks, what was found, and what the learner's own code
    printed in it, by rank."""

    probe: Probe
    world_size: int
    findings: list[Finding]
    printed: list[list[str]]


def find_mistake(cls: type[nn.Module], step: str, probes: Sequence[Probe]) -> Mistake | None:
    """The first of ``probes`` that the class fails, on 2 or on 3 ranks; ``None`` if it passes."""
    mistake = None
    for world_size in (2, 3):
        found = try_on(world_size, cls, step, probes)
        if found:  # from here on only an earlier one counts
            mistake, probes = found, probes[: probes.index(found.probe)]
    return mistake


def try_on(
    world_size: int,
    cls: type[nn.Module],
    step: str,
    probes: Sequence[Probe],
    limit: float = TIME_LIMIT,
) -> Mistake | None:
    """The first of ``probes`` that the class fails on so many ranks, within ``limit`` seconds."""
    chosen = [probe for probe in probes if world_size in probe.world_sizes]
    if not chosen:
        return None
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            results = launch(run_all, cls, step, chosen, nprocs=world_size, timeout=limit)
    except LaunchError as error:
        journals = read_journals(text.getvalue(), world_size)
        quiet = time.time() - max(journal.last_word for journal in journals)
        if isinstance(error, LaunchTimeout) and limit < SLOW_LIMIT and quiet < QUIET:
            return try_on(world_size, cls, step, probes, SLOW_LIMIT)
        failed = max(journal.probe for journal in journals)
        # What the probes before had seen is gone with the ranks. A mistake there is the cause.
        earlier = try_on(world_size, cls, step, chosen[:failed])
        return earlier or crash_of(chosen[failed], error, journals)
    journals = read_journals(text.getvalue(), world_size)
    for number, (probe, *evidence) in enumerate(zip(chosen, *results, strict=True)):
        if findings := list(probe.diagnose(evidence)):
            return Mistake(probe, world_size, findings, [j.printed[number] for j in journals])
    return None


def crash_of(probe: Probe, error: LaunchError, journals: Sequence[Journal]) -> Mistake:
    """The mistake that ended a launch in the middle of this probe."""
    if probe.advise:
        for journal in journals:
            journal.advice = probe.advise(journals)
    printed = [journal.printed[journal.probe] for journal in journals]
    return Mistake(probe, len(journals), [finding_of(error, journals)], printed)


def run_all(cls: type[nn.Module], step: str, probes: Sequence[Probe]) -> list[Any]:
    """In a rank: the evidence of every probe."""
    others, evidence = Others(), []
    for number, probe in enumerate(probes):
        write_journal({"probe": number})
        learner = Learner(cls, step, others.wait)
        with Collectives(learner), contextlib.redirect_stdout(Said()):
            evidence.append(probe.run(learner))
        others.wait()
    return evidence


class Others:
    """The other ranks, in a process group of its own: a collective that the learner's code has
    left behind can't meet ours there."""

    def __init__(self):
        self.group = dist.new_group()

    def wait(self) -> None:
        """Return when all ranks have come here, so that probes don't meet."""
        with _disable_current_modes():  # it is not the learner's collective
            dist.barrier(group=self.group)

    def waits_for(self) -> str:
        """What ``launch`` tells of a rank that stands here."""
        return "the other ranks"


def read_journals(text: str, world_size: int) -> list[Journal]:
    """Every rank's journal, from all that they have printed."""
    journals = [Journal() for _ in range(world_size)]
    for line in text.split("\n"):
        if not (parts := LINE.match(line)):
            continue
        journal = journals[int(parts[1])]
        _, mark, entry = parts[2].partition(JOURNAL)
        if mark:
            with contextlib.suppress(json.JSONDecodeError):  # cut off: too much was printed
                journal.read(json.loads(entry))
    return journals
