"""Run probes of a learner's class on real ranks; a crash or a hang is a finding like any other.

Three things may end a launch before its probes are through: the learner's code raises, it waits
for something that never comes, or C++ gives up and takes the process along. What a rank was doing
then, and which collectives it had started, stands in its journal. The evidence of the probes before
lies in files, one for each rank and probe.
"""

import contextlib
import io
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ddp_teach.exercises import journal
from ddp_teach.exercises.collectives import Collectives, NeverEnds
from ddp_teach.exercises.crash import finding_of
from ddp_teach.exercises.journal import Journal
from ddp_teach.exercises.probe import Finding, Learner, Probe
from ddp_teach.launch import LaunchError, LaunchTimeout, launch

TIME_LIMIT = 3.0  # seconds for all probes of a launch; they take about one
MORE_TIME = 3  # times as long if the ranks still work then: the machine has a lot else to do
LAST_LIMIT = 80.0


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
        chosen = [probe for probe in probes if world_size in probe.world_sizes]
        found = try_on(world_size, cls, step, chosen) if chosen else None
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
    """The first of ``probes`` that the class fails on so many ranks. What takes longer than
    ``limit`` seconds is a hang if the ranks are stuck; else they get more time."""
    text, error = io.StringIO(), None
    with tempfile.TemporaryDirectory() as folder:
        try:
            with contextlib.redirect_stdout(text):
                launch(run_all, cls, step, probes, folder, nprocs=world_size, timeout=limit)
        except LaunchError as failure:
            error = failure
        evidence = read_evidence(Path(folder), len(probes), world_size)
    journals = journal.read_journals(text.getvalue(), world_size)
    if isinstance(error, LaunchTimeout) and limit < LAST_LIMIT and not journal.stuck(journals):
        return try_on(world_size, cls, step, probes, MORE_TIME * limit)
    for number, (probe, of_ranks) in enumerate(zip(probes, evidence, strict=False)):
        if findings := list(probe.diagnose(of_ranks)):
            return Mistake(probe, world_size, findings, [j.printed[number] for j in journals])
    failed = min(len(evidence), len(probes) - 1)
    return crash_of(probes[failed], error, journals) if error else None


def crash_of(probe: Probe, error: LaunchError, journals: Sequence[Journal]) -> Mistake:
    """The mistake that ended a launch in the middle of this probe."""
    what = str(error).splitlines()[0]
    if probe.advise and (" raised " not in what or NeverEnds.__name__ in what):
        for told in journals:
            told.advice = probe.advise(journals)
    printed = [told.printed[told.probe] for told in journals]
    return Mistake(probe, len(journals), [finding_of(error, journals)], printed)


def run_all(cls: type[nn.Module], step: str, probes: Sequence[Probe], folder: str) -> None:
    """In a rank: run every probe, and leave its evidence in the folder."""
    others = Others()
    with journal.pulse():
        for number, probe in enumerate(probes):
            journal.write({"probe": number})
            learner = Learner(cls, step, others.wait)
            with Collectives(learner.events), contextlib.redirect_stdout(journal.Said()):
                evidence = probe.run(learner)
            file = Path(folder, f"{number}-{dist.get_rank()}")
            file.with_suffix(".part").write_bytes(pickle.dumps(evidence))
            file.with_suffix(".part").rename(file)  # there at once, or not at all
            others.wait()


def read_evidence(folder: Path, probes: int, world_size: int) -> list[list[Any]]:
    """By probe and rank; up to the first probe that not all ranks have come through."""
    evidence = []
    for number in range(probes):
        files = [folder / f"{number}-{rank}" for rank in range(world_size)]
        if not all(file.exists() for file in files):
            break
        evidence.append([pickle.loads(file.read_bytes()) for file in files])
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
