"""A launch that did not end well, told as a finding: what was done, and whose line it was."""

import re
from textwrap import shorten
from typing import TYPE_CHECKING

from ddp_teach.exercises.probe import STILL_TO_DO, Finding
from ddp_teach.failures import LaunchError, LaunchTimeout

if TYPE_CHECKING:
    from ddp_teach.exercises.engine import Journal

SAME_ROOT = "Every rank must name the same one."
SAME_ORDER = "Every rank must start the same collectives, of the same sizes, in the same order."


def finding_of(error: LaunchError, journals: list["Journal"]) -> Finding:
    """What ended the launch."""
    if isinstance(error, LaunchTimeout):
        return hang(error, journals)
    journal = journals[error.rank]
    if " raised " in str(error).splitlines()[0]:
        return exception(error, journal)
    what, *lines = str(error).splitlines()
    hint = [f"{what} during {journal.doing}.", difference(journals), journal.advice]
    frames = [line for line in lines if not line.startswith("  C++ said: ")]
    return Finding(" ".join(filter(None, hint)), lines=tuple(frames[-2:]))


def exception(error: LaunchError, journal: "Journal") -> Finding:
    """The exception, and the learner's own line that led to it."""
    message, *frames = str(error).splitlines()
    raised = shorten(message.partition(" raised ")[2], 240, placeholder=" ...").rstrip(".")
    frames = [line for line in frames if line.startswith("  ")]
    if frames and "raise NotImplementedError" in frames[-1]:
        task = raised.partition(": ")[2] or f"what {journal.doing} needs"
        return Finding(f"{STILL_TO_DO}{task}.")
    hint = f"On rank {error.rank} {journal.doing} raised {raised}. {journal.advice}".strip()
    return Finding(hint, lines=tuple(frames[-2:]))


def hang(error: LaunchTimeout, journals: list["Journal"]) -> Finding:
    """Where every rank stands, and what it waits for."""
    first, *rest = str(error).splitlines()
    limit = first.partition(" within ")[2]
    lines, at_the_end = [], []
    for line in rest:
        if line.startswith("rank "):
            rank, ours = int(line.split()[1]), line.endswith(" waits for the other ranks")
            ours = ours or line.endswith(" has returned")
            at_the_end += [rank] if ours else []
            lines.append(
                f"rank {rank} is through" if ours else line.replace(" is running", " stands at")
            )
        elif line.startswith(" ") and not ours:
            lines.append(line)
    stuck = [rank for rank in range(len(journals)) if rank not in at_the_end] or [0]
    journal = journals[stuck[0]]
    why = difference(journals) or missing(journals)
    why = why or "No collective is missing: it waits for something else, or never leaves a loop."
    hint = f"{journal.doing} does not come to an end on rank {stuck[0]} (stopped after {limit})"
    return Finding(f"{hint}. {why} {journal.advice}".strip(), lines=tuple(lines))


def difference(journals: list["Journal"]) -> str:
    """The first collective that is not the same on all ranks; empty if there is none."""
    for number, calls in enumerate(zip(*(j.started for j in journals), strict=False), 1):
        if len(set(calls)) > 1:
            each = ", ".join(f"{call} on rank {rank}" for rank, call in enumerate(calls))
            cure = (
                SAME_ORDER
                if len({re.sub(" (from|to) .*", "", call) for call in calls}) > 1
                else SAME_ROOT
            )
            return f"Collective number {number} is {each}. {cure}"
    return ""


def missing(journals: list["Journal"]) -> str:
    """The first collective that some ranks never start; empty if there is none."""
    most = max(journals, key=lambda journal: len(journal.started))
    least = min(journals, key=lambda journal: len(journal.started))
    if len(most.started) == len(least.started):
        return ""
    number, rank, other = len(least.started), journals.index(most), journals.index(least)
    call = most.started[number]
    what = f"Rank {rank} waits for rank {other} in collective number {number + 1}, {call}"
    return f"{what}, which rank {other} never starts. {SAME_ORDER}"
