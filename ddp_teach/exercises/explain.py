"""Hints about gradients: from what they were made of to the mistake that makes them so."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from ddp_teach.exercises.mixture import Mixture, close, expected_gradients, high, mixture_of
from ddp_teach.exercises.probe import Finding, not_waited_for, ranks_text
from ddp_teach.exercises.training import Step

MOST_NAMES = 3
WAIT = "Call wait() on each before you use it."
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
    if any(not_waited_for(step.events) for step in iterations[0]):
        yield Finding(
            f"gradients {EARLY}: this time they were right, by luck. {waits(iterations[0])} {WAIT}"
        )


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
        yield Finding(
            f"{subject} {text.replace('@', since, 1)} {names_of_one(names, steps[0])}".strip(),
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
    got = [steps[rank].after[name] for rank in ranks]
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
    if too_early(name, iterations):
        return (
            f"{EARLY}@: ranks that wait for a slower one end with numbers "
            f"that were not reduced yet. {waits(steps)} {WAIT}"
        )
    last = iterations[number - 1] if number else None
    mixtures = {rank: mixture_of(name, rank, steps, last) for rank in ranks}
    if all(close(gradient, expected, 2e-2) for gradient in got):
        return f"are right to two or three digits only on {on}@: they were sent in a smaller dtype."
    if len(ranks) < len(steps) and any(e.kind == "reduce" for e in steps[0].events):
        return f"are wrong on {on}@: dist.reduce gives the result to one rank, all_reduce to all."
    if any(mixture is None for mixture in mixtures.values()):
        return f"are wrong on {on}@, and no sum of the ranks' gradients either."
    return of_mixtures(name, mixtures, steps, on)


def too_early(name: str, iterations: Sequence[Sequence[Step]]) -> bool:
    """Whether something was not waited for, and a rank that had to wait for a late one ends with
    what it had itself, or with something torn; the late rank has more, by then all have sent."""
    if not any(not_waited_for(step.events) for step in iterations[0]):
        return False
    on_late, torn = [], False
    for number, steps in enumerate(iterations):
        last = iterations[number - 1] if number else None
        expected = expected_gradients(steps)[name]
        for rank in wrong_ranks(name, steps, expected):
            mixture = mixture_of(name, rank, steps, last)
            own = mixture and list(mixture.weights) == [("local", rank, name)]
            torn = torn or not mixture or own and rank != steps[0].late
            on_late += [own] if rank == steps[0].late else [False]
    return torn and not all(on_late)


def collectives(step: Step) -> int:
    """How many collectives the rank started."""
    return sum(event.collective for event in step.events)


def waits(steps: Sequence[Step]) -> str:
    """How many collectives were started and how many of them waited for, on rank 0."""
    missing = not_waited_for(steps[0].events)
    started = collectives(steps[0])
    were = "were" if started - missing != 1 else "was"
    many = f"{started} collective{'s'[: started > 1]}"
    return f"Of {many} on rank 0, {started - missing} {were} waited for."


def not_sent(steps: Sequence[Step]) -> str:
    """That not all bytes of the gradients were sent, and why perhaps; empty if they were."""
    gradients = [g for g in steps[0].local.values() if g is not None]
    needed = sum(g.numel() * g.element_size() for g in gradients)
    done = sum(event.nbytes for event in steps[0].events)
    if done >= needed:
        return ""
    started = collectives(steps[0])
    what = f"Only {done} of {needed} bytes were sent." if started else "No collective was started."
    return f"{what} {steps[0].told}".strip()


def of_mixtures(name: str, mixtures: dict[int, Mixture], steps: Sequence[Step], on: str) -> str:
    """The verdict where it is known for every wrong rank what its gradient is made of."""
    size = len(steps)
    others = [mixture.others(name) for mixture in mixtures.values()]
    rows = {rank: mixture.of_ranks(name, size) for rank, mixture in mixtures.items()}
    if any(others):
        return of_others(name, others, rows, on)
    if all(max(row) - min(row) < 2e-3 * max(map(abs, row)) for row in rows.values()):
        ratios = {round(sum(row), 2) for row in rows.values()}
        if len(ratios) == 1:
            return ratio_text(ratios.pop(), size, on)
    own = {round(row[rank], 3) for rank, row in rows.items()}
    only_own = all(sum(map(abs, row)) == abs(row[rank]) for rank, row in rows.items())
    if only_own and len(own) == 1:
        return own_text(own.pop(), list(rows), steps, on)
    sources = {tuple(row) for row in rows.values()}
    if len(sources) == 1 and sorted(row := sources.pop())[-2:] == [0.0, 1.0]:
        source = row.index(1.0)
        return (
            f"are those of rank {source} on {on}@: copied from one rank, not averaged over "
            "all. Every rank's data counts: use an all-reduce."
        )
    return f"are {mixed(rows)}@; the mean is {1 / size:.3g} of every rank."


def ratio_text(ratio: float, size: int, on: str) -> str:
    """For a gradient that is ``ratio`` times the mean."""
    if ratio == 0:
        return f"are all zero on {on}@."
    if ratio < 0:
        return f"have the wrong sign on {on}@: {ratio:g} times the mean."
    what = (
        f"are {ratio:.1f} times too large" if ratio > 1 else f"are {1 / ratio:.1f} times too small"
    )
    divisor = size / ratio
    if abs(ratio - size) < 0.02:
        why = "summed, not averaged. Divide by the world size."
    elif abs(divisor - size * size) < 0.05 * size:
        why = f"divided by the world size twice, by {size} and by {size} again."
    elif abs(ratio - size * size) < 0.05 * size:
        why = "summed twice, and never divided by the world size."
    elif abs(divisor - round(divisor)) < 0.02 * divisor:
        why = (
            f"the sum was divided by {round(divisor)}, but there are {size} ranks. "
            "dist.get_world_size() tells how many."
        )
    else:
        why = f"the sum was divided by {divisor:.3g}, but there are {size} ranks."
    return f"{what} on {on}@: {why}"


def own_text(weight: float, ranks: list[int], steps: Sequence[Step], on: str) -> str:
    """For a gradient that holds ``weight`` times the rank's own and nothing of the others'."""
    size = len(steps)
    if len(ranks) < size:
        rest = ranks_text([rank for rank in range(size) if rank not in ranks], size)
        return (
            f"are the mean on {rest} only@; {on} still holds its own local gradient. All ranks "
            "need the result."
        )
    if weight == 1:
        why = not_sent(steps) or "They were sent, but the mean did not get into .grad."
        return f"are still the local ones on {on}@. {why}"
    why = not_sent(steps) or "They were sent, but the sum did not get into .grad."
    return f"are {weight:.3g} times the local ones on {on}@: divided, but not added up. {why}"


def of_others(name: str, others: list[dict], rows: dict[int, list[float]], on: str) -> str:
    """For a gradient in which there is something that does not belong there."""
    kinds = {part[0] for parts in others for part in parts}
    if kinds == {"last"}:
        old = (
            "still those of the iteration before"
            if not any(map(any, rows.values()))
            else ("mixed with those of the iteration before")
        )
        return f"are {old} on {on}@: something is kept from one backward to the next."
    if kinds == {"before"}:
        return (
            f"count what stood in .grad before backward {next(iter(others[0].values())):.3g} "
            f"times on {on}@. Once is right, as without a wrapper."
        )
    foreign = sorted({part[2] for parts in others for part in parts if part[0] == "local"})
    if foreign:
        return (
            f"are mixed up with those of {some(foreign)} on {on}@: values went to the wrong "
            "place, or the ranks sent them in different orders."
        )
    return f"contain something that does not belong there on {on}@."


def mixed(rows: dict[int, list[float]]) -> str:
    """ "1 of rank 0 + 0.5 of rank 1 on rank 0"."""
    texts = []
    for rank, row in rows.items():
        parts = [f"{weight:.3g} of rank {other}'s" for other, weight in enumerate(row) if weight]
        texts.append(f"{' + '.join(parts)} on rank {rank}")
    return " and ".join(texts)


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def first_difference(expected: Tensor | None, got: Sequence[Tensor | None]) -> tuple[int, ...]:
    """The first place at which a rank's tensor is clearly not the expected one."""
    if expected is None or not expected.numel():
        return ()
    for tensor in got:
        if tensor is not None and tensor.shape == expected.shape:
            off = (tensor.to(high(tensor)) - expected.to(high(expected))).abs()
            if off.max() > 0:
                return tuple((off > off.max() / 50).nonzero()[0].tolist())
    return (0,) * expected.dim()


def number_texts(
    expected: Tensor | None, got: Sequence[Tensor | None], place: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """One number, as expected and as every rank got it: four digits, or as many as tell them
    apart."""
    for digits in (4, 9):
        wanted = number_text(expected, place, digits)
        texts = tuple(number_text(tensor, place, digits) for tensor in got)
        if set(texts) != {wanted}:
            break
    return (wanted,) * len(texts), texts


def number_text(tensor: Tensor | None, place: tuple[int, ...], digits: int) -> str:
    if tensor is None:
        return "None"
    if tensor.dim() != len(place) or not tensor.numel():
        return f"shape {list(tensor.shape)}"
    return f"{tensor[place].item():.{digits}g}"
