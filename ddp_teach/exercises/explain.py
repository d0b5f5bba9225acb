"""Hints about gradients: from what they were made of to the mistake that makes them so."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from ddp_teach.exercises.collectives import not_waited_for
from ddp_teach.exercises.mixture import close, expected_gradients, mixture_of
from ddp_teach.exercises.no_mixture import of_values
from ddp_teach.exercises.probe import Finding, ranks_text
from ddp_teach.exercises.training import Step
from ddp_teach.exercises.verdicts import of_mixtures
from ddp_teach.exercises.wording import first_difference, number_texts, some

WAIT = "Call wait() on each before {by}."
TOO_LATE = "Each was waited for, but too late: .grad had its numbers by then."
SET_BACK = "What a backward pass counts and keeps must be set back for the next one."
EARLY = "are read before they are there"


def explain(evidence: Sequence[Sequence[Step]]) -> Iterator[Finding]:
    """What is wrong with the gradients of ``evidence[rank][iteration]``: the first iteration in
    which anything is, one finding for every kind of mistake in it."""
    iterations = list(zip(*evidence, strict=True))
    changed = {name for steps in iterations for step in steps for name in step.changed}
    if changed:
        yield Finding(
            f"Synchronising has changed the parameters themselves ({some(sorted(changed))}). "
            "Average their .grad and leave their values alone: the optimizer changes those."
        )
        return
    for number, steps in enumerate(iterations):
        expected = expected_gradients(steps)
        wrong = [name for name in expected if wrong_ranks(name, steps, expected[name])]
        if wrong:
            yield from explain_iteration(number, iterations, wrong)
            return
    for steps in iterations:
        if any(not_waited_for(step.events) for step in steps):
            yield Finding(f"gradients {EARLY}: this time they were right, by luck. {waits(steps)}")
            return


def explain_iteration(
    number: int, iterations: Sequence[Sequence[Step]], wrong: list[str]
) -> Iterator[Finding]:
    """One finding for every kind of mistake in this iteration."""
    steps = iterations[number]
    expected = expected_gradients(steps)
    all_names = [name for name, gradient in expected.items() if gradient is not None]
    groups: dict[str, list[str]] = {}
    for name in wrong:
        groups.setdefault(verdict(name, number, iterations), []).append(name)
    for text, names in groups.items():
        subject = "gradients" if names == all_names else f"gradients of {some(names)}"
        since = f" (in iteration {number + 1}; before it they were right)" if number else ""
        got: list[Tensor | None] = [step.after[names[0]] for step in steps]
        numbers = got
        if EARLY in text:  # what the late rank has by now is a matter of chance
            numbers = [gradient for rank, gradient in enumerate(got) if rank != steps[0].late]
        place = first_difference(expected[names[0]], numbers)
        texts, got_texts = number_texts(expected[names[0]], got, place)
        if EARLY in text:
            late = steps[0].late
            got_texts = (*got_texts[:late], "(it was late)", *got_texts[late + 1 :])
        more = names_of_one(names, steps[0]) or set_back(number, text, steps)
        yield Finding(
            f"{subject} {text.replace('@', since, 1)} {more}".strip(),
            f"gradient of {names[0]}{list(place) or ''} in iteration {number + 1}",
            texts,
            got_texts,
        )


def names_of_one(names: Sequence[str], step: Step) -> str:
    """That a parameter has several names, where it is the only one that is wrong."""
    tied = step.tied.get(names[0], [])
    if len(names) > 1 or len(tied) < 2:
        return ""
    return f"It is one parameter with {len(tied)} names, {' and '.join(tied)}: treat it once."


def set_back(number: int, text: str, steps: Sequence[Step]) -> str:
    """That something is left of the first backward pass, where the second does not average."""
    before = any(g is not None and g.any() for step in steps for g in step.before.values())
    return SET_BACK if number and not before and "still the local ones" in text else ""


def wrong_ranks(name: str, steps: Sequence[Step], expected: Tensor | None) -> list[int]:
    """The ranks on which the gradient is not the expected one."""
    return [rank for rank, step in enumerate(steps) if not right(step.after[name], expected)]


def right(got: Tensor | None, expected: Tensor | None) -> bool:
    if got is None or expected is None:
        return got is None and expected is None
    return got.dtype == expected.dtype and close(got, expected)


def verdict(name: str, number: int, iterations: Sequence[Sequence[Step]]) -> str:
    """What is wrong with one parameter's gradients, as a sentence that goes on after the word
    "gradients"; ``@`` stands where the iteration may be told."""
    steps = iterations[number]
    expected = expected_gradients(steps)[name]
    ranks = wrong_ranks(name, steps, expected)
    on = ranks_text(ranks, len(steps))
    if text := at_first_sight([steps[rank].after[name] for rank in ranks], expected, on):
        return text
    if too_early(name, iterations):
        return (
            f"{EARLY}@: ranks that wait for a slower one end with numbers "
            f"that were not reduced yet. {waits(steps)}"
        )
    first, now = iterations[0][0].collectives, steps[0].collectives
    if now > first:
        return (
            f"are wrong on {on}@: {now} collectives were started, {first} in iteration 1. Register "
            "hooks once, in __init__."
        )
    if len(ranks) < len(steps) and any(e.kind == "reduce" for e in steps[0].events):
        return f"are wrong on {on}@: dist.reduce gives the result to one rank, all_reduce to all."
    last = iterations[number - 1] if number else None
    mixtures = {rank: mixture_of(name, rank, steps, last) for rank in ranks}
    if not all(mixtures.values()):
        return of_values(name, steps, ranks, on)
    return of_mixtures(name, mixtures, steps, on)


def at_first_sight(got: Sequence[Tensor | None], expected: Tensor | None, on: str) -> str:
    """What can be said without asking what the gradients were made of; empty if nothing."""
    if expected is None:
        return f"should be None on {on}@: the parameter is frozen, leave it as it is."
    if any(gradient is None for gradient in got):
        return f"are None on {on}@, though backward has made some."
    if not all(gradient.isfinite().all() for gradient in got):
        return f"are not finite on {on}@: something overflowed, or memory was read unset."
    if any(gradient.dtype != expected.dtype for gradient in got):
        return f"have become {got[0].dtype} on {on}@; the parameter is {expected.dtype}."
    if not any(gradient.any() for gradient in got):
        return f"are all zero on {on}@."
    if all(close(gradient, expected, 2e-2) for gradient in got):
        return f"are right to a few digits only on {on}@: they were sent in a smaller dtype."
    return ""


def too_early(name: str, iterations: Sequence[Sequence[Step]]) -> bool:
    """Whether ranks that had to wait for a late one end with what they had themselves, or with
    something torn, while the late one has more: by the time it sends, all others have sent."""
    if iterations[0][0].late is None:
        return False
    on_late, torn, own_only, late_right = [], False, True, True
    for number, steps in enumerate(iterations):
        last = iterations[number - 1] if number else None
        expected = expected_gradients(steps)[name]
        for rank in wrong_ranks(name, steps, expected):
            mixture = mixture_of(name, rank, steps, last)
            own = bool(mixture) and list(mixture.weights) == [("local", rank, name)]
            torn = torn or not mixture or own and rank != steps[0].late
            own_only = own_only and own
            late_right = late_right and rank != steps[0].late
            on_late.append(own and rank == steps[0].late)
    if any(not_waited_for(step.events) for steps in iterations for step in steps):
        return torn and not all(on_late)
    late_ones = {steps[0].late for steps in iterations if any_wrong(name, steps)}
    return torn and own_only and late_right and len(late_ones) > 1


def any_wrong(name: str, steps: Sequence[Step]) -> bool:
    return bool(wrong_ranks(name, steps, expected_gradients(steps)[name]))


def waits(steps: Sequence[Step]) -> str:
    """How many collectives were started and how many of them waited for, on rank 0; what to do."""
    missing = not_waited_for(steps[0].events)
    if not missing:
        return TOO_LATE
    started = steps[0].collectives
    were = "were" if started - missing != 1 else "was"
    many = f"{started} collective{'s'[: started > 1]}"
    cure = WAIT.format(by=steps[0].by)
    return f"Of {many} on rank 0, {started - missing} {were} waited for. {cure}"
