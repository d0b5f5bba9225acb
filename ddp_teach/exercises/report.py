"""The text of a check: which steps are passed; where not, expected against got, and the hint."""

import textwrap
from collections.abc import Sequence

from ddp_teach.exercises.engine import Mistake
from ddp_teach.exercises.probe import STILL_TO_DO, Finding

WIDTH = 96  # columns
MOST_PRINTED = 5  # lines of the learner's own, per rank


def report(name: str, steps: Sequence[str], failed: str | None, mistake: Mistake | None) -> str:
    """The whole text; ``failed`` is the step that ``mistake`` belongs to."""
    lines = [f"{name}, step {steps[-1]!r}, on 2 and 3 ranks"]
    for step in steps:
        if step == failed:
            lines.append(f"  {step:<11} not yet")
            lines += [f"    {line}".rstrip() for line in details(mistake)]
            break
        lines.append(f"  {step:<11} passed")
    return "\n".join(lines)


def details(mistake: Mistake) -> list[str]:
    """What went wrong, in lines."""
    lines = [f"Tried on {mistake.world_size} ranks: {mistake.probe.name}."]
    for finding in mistake.findings:
        lines += table(finding)
        lines += finding.lines
        hint = finding.hint if finding.hint.startswith(STILL_TO_DO) else f"Hint: {finding.hint}"
        lines += textwrap.wrap(hint, WIDTH - 4, subsequent_indent="      ")
    for rank, printed in enumerate(mistake.printed):
        lines += [f"[rank {rank}] {line}" for line in printed[:MOST_PRINTED]]
        if len(printed) > MOST_PRINTED:
            lines.append(f"[rank {rank}] ... and {len(printed) - MOST_PRINTED} lines more")
    return lines


def table(finding: Finding) -> list[str]:
    """Expected against got, a line for every rank."""
    if not finding.got:
        return [finding.where] if finding.where else []
    width = max(len("expected"), *map(len, finding.expected))
    rows = zip(finding.expected, finding.got, strict=True)
    lines = [f"{finding.where}:", f"        {'expected':<{width}}  got"]
    lines += [f"rank {rank}  {a:<{width}}  {b}" for rank, (a, b) in enumerate(rows)]
    return lines
