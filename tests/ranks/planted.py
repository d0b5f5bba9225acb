"""Wrappers as learners write them: right ones in several styles, and wrong ones, each with one
planted fault and the words that the check must find for it.

    @right(AVERAGE)
    class Summed(...): ...

    @fault(AVERAGE, "2.0 times too large", "summed, not averaged")
    class Summed(...): ...
"""

from dataclasses import dataclass, field

from ddp_teach.exercises import CheckResult, check


@dataclass
class Planted:
    """The wrappers planted for one step; of the wrong ones the words of their hints, too."""

    step: str
    right: list[type] = field(default_factory=list)
    wrong: list[tuple[type, tuple[str, ...]]] = field(default_factory=list)

    rare: list[tuple[type, tuple[str, ...]]] = field(default_factory=list)  # tried at night only


def right(planted):
    """Decorates a class that must pass."""

    def keep(cls):
        planted.right.append(cls)
        return cls

    return keep


def fault(planted, *words, rare=False):
    """Decorates a class that must not pass, with hints that hold all these words."""

    def keep(cls):
        (planted.rare if rare else planted.wrong).append((cls, words))
        return cls

    return keep


def assert_passes(planted, cls):
    result = check(cls, step=planted.step)
    assert result.passed and result.hints == (), result.report
    assert result.steps_passed[-1] == planted.step


def assert_is_named(planted, cls, words) -> CheckResult:
    """The check refuses the class, at this step, and its hints hold the words."""
    result = check(cls, step=planted.step)
    assert not result.passed
    assert planted.step not in result.steps_passed
    said = " ".join(result.hints)
    missing = [word for word in words if word not in said]
    assert not missing, f"the hints do not say {missing}:\n{result.report}"
    return result
