"""Check a wrapper that you wrote yourself: on real ranks, with hints that name the mistake.

from ddp_teach.exercises import check

check(MyWrapper, step="average")
"""

from dataclasses import dataclass, field

from torch import nn

from ddp_teach.call import short
from ddp_teach.exercises import (
    average,
    buckets,
    forward,
    join,
    no_sync,
    overlap,
    same_start,
    unused,
)
from ddp_teach.exercises.engine import find_mistake
from ddp_teach.exercises.report import report

__all__ = ["STEPS", "CheckFailed", "CheckResult", "check"]

STEPS = {
    "forward": forward.PROBES,
    "same_start": same_start.PROBES,
    "average": average.PROBES,
    "overlap": overlap.PROBES,
    "buckets": buckets.PROBES,
    "no_sync": no_sync.PROBES,
    "unused": unused.PROBES,
    "join": join.PROBES,
}


@dataclass(frozen=True)
class CheckResult:
    """What came of a check: ``passed``; the steps that were passed, in their order; and ``hints``,
    which is empty if ``passed``. ``report`` is the text that was printed."""

    passed: bool
    step: str
    steps_passed: tuple[str, ...]
    hints: tuple[str, ...]
    report: str = field(repr=False)

    def __bool__(self) -> bool:
        return self.passed


class CheckFailed(AssertionError):
    """The wrapper did not pass; the message is the report, ``result`` the ``CheckResult``."""

    def __init__(self, result: CheckResult):
        super().__init__(result.report)
        self.result = result


def check(cls: type[nn.Module], step: str, raise_on_failure: bool = False) -> CheckResult:
    """Test your wrapper class on 2 and 3 ranks: this step and all before it. Print what came of it.

    The class is an ``nn.Module`` that is built as ``cls(module)`` and keeps ``module`` as its
    attribute of that name. Where a step is not passed, the report shows what was expected and what
    each rank got, and a hint that names the mistake; later steps are then not looked at. A wrapper
    that never comes to an end is stopped after a few seconds.

    Raises:
        CheckFailed: not passed, and ``raise_on_failure`` is true (for autograders).
        TypeError, ValueError: an argument can't be used; nothing was run.
    """
    check_arguments(cls, step, raise_on_failure)
    names = list(STEPS)[: list(STEPS).index(step) + 1]
    mistake = find_mistake(cls, step, [probe for name in names for probe in STEPS[name]])
    failed = next((name for name in names if mistake and mistake.probe in STEPS[name]), None)
    text = report(cls.__name__, names, failed, mistake)
    hints = tuple(finding.hint for finding in mistake.findings) if mistake else ()
    passed = tuple(names[: names.index(failed)] if failed else names)
    result = CheckResult(mistake is None, step, passed, hints, text)
    if mistake and raise_on_failure:
        raise CheckFailed(result)
    print(text)
    return result


def check_arguments(cls: type[nn.Module], step: str, raise_on_failure: bool) -> None:
    """Raise TypeError or ValueError, in one line, for what ``check`` can't work with."""
    if isinstance(cls, nn.Module):
        name = type(cls).__name__
        raise TypeError(f"check: cls must be the class itself, {name}, got an instance of it")
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        raise TypeError(f"check: cls must be a class made from torch.nn.Module, got {short(cls)}")
    accepted = f"one of {', '.join(map(repr, STEPS))}"
    if not isinstance(step, str):
        raise TypeError(f"check: step must be {accepted}, got {short(step)}")
    if step not in STEPS:
        raise ValueError(f"check: step must be {accepted}, got {step!r}")
    if not isinstance(raise_on_failure, bool):
        accepted = "True or False"
        raise TypeError(
            f"check: raise_on_failure must be {accepted}, got {short(raise_on_failure)}"
        )
