"""Checks many wrappers for one step in one launch per world size, quick enough for a hundred.

What ``check`` does besides is left out: the steps before are not looked at, and a wrapper that ends
a launch is for ``assert_is_stopped``.
"""

from collections.abc import Sequence

from torch import nn

from ddp_teach.exercises import STEPS
from ddp_teach.exercises.collectives import Collectives
from ddp_teach.exercises.engine import Others, find_mistake
from ddp_teach.exercises.probe import Finding, Learner, Probe
from ddp_teach.launch import launch

Findings = list[Finding]


def find_all(step: str, classes: Sequence[type[nn.Module]]) -> dict[type[nn.Module], Findings]:
    """The findings of the first probe that each class fails; an empty list if it passes."""
    failed = {cls: {} for cls in classes}  # by place of the probe
    for world_size in (2, 3):
        probes = [probe for probe in STEPS[step] if world_size in probe.world_sizes]
        evidence = launch(try_all, step, classes, probes, nprocs=world_size, timeout=100)
        for cls, of_ranks in zip(classes, zip(*evidence, strict=True), strict=True):
            for probe, *of_probe in zip(probes, *of_ranks, strict=False):
                place = STEPS[step].index(probe)
                raised = [seen for seen in of_probe if isinstance(seen, Finding)]
                failed[cls][place] = raised or list(probe.diagnose(of_probe))
    by_place = {cls: [found[k] for k in sorted(found)] for cls, found in failed.items()}
    return {cls: next(filter(None, found), []) for cls, found in by_place.items()}


def try_all(step: str, classes: Sequence[type[nn.Module]], probes: Sequence[Probe]) -> list[list]:
    """In a rank: for every class the evidence of all probes, up to the first that raises."""
    others = Others()
    return [try_one(step, cls, probes, others) for cls in classes]


def try_one(step: str, cls: type[nn.Module], probes: Sequence[Probe], others: Others) -> list:
    evidence = []
    for probe in probes:
        learner = Told(cls, step, others.wait)
        try:
            with Collectives(learner.events):
                evidence.append(probe.run(learner))
        except Exception as error:
            return [*evidence, Finding(f"{learner.last} raised {error}")]
        others.wait()
    return evidence


class Told(Learner):
    """Keeps what it was told last."""

    last = ""

    def doing(self, what: str, advice: str = "") -> None:
        self.last = f"{what} {advice}"


def assert_is_named(findings: Findings, words: Sequence[str]) -> None:
    """There are findings, and their hints hold the words."""
    assert findings, "it passes"
    said = " ".join(finding.hint for finding in findings)
    missing = [word for word in words if word not in said]
    assert not missing, f"the hints do not say {missing}: {said}"


def assert_is_stopped(step: str, cls: type[nn.Module], words: Sequence[str]) -> None:
    """The engine ends a launch that would not end by itself, or that C++ has ended, and the hint
    holds the words."""
    mistake = find_mistake(cls, step, STEPS[step])
    assert mistake, "it passes"
    assert_is_named(mistake.findings, words)
