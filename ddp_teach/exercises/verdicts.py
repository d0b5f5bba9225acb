"""What a gradient's mixture means: the mistake, in words.

Every text goes on after the word "gradients"; ``@`` stands where the iteration may be told.
"""

from collections.abc import Sequence

import torch

from ddp_teach.exercises.mixture import Mixture, close, expected_gradients
from ddp_teach.exercises.probe import ranks_text
from ddp_teach.exercises.training import Step
from ddp_teach.exercises.wording import some


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
    added = [[w - (rank == r) for r, w in enumerate(row)] for rank, row in rows.items()]
    if all(abs(weight - 1 / size) < 5e-3 for row in added for weight in row):
        return f"are the local ones plus the mean on {on}@: the mean replaces the local gradient."
    return f"are {mixed(rows, on)}@; the mean is {1 / size:.3g} of every rank."


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
        how = "mixed with" if any(map(any, rows.values())) else "still"
        return (
            f"are {how} those of the iteration before on {on}@: something is kept from one "
            "backward to the next."
        )
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


def mixed(rows: dict[int, list[float]], on: str) -> str:
    """ "1 of rank 0's + 0.5 of rank 1's on rank 0"; one text where it is the same on all."""
    texts = {}
    for rank, row in rows.items():
        parts = [f"{weight:.3g} of rank {other}'s" for other, weight in enumerate(row) if weight]
        texts.setdefault(" + ".join(parts), []).append(f"rank {rank}")
    if len(texts) == 1:
        return f"{next(iter(texts))} on {on}"
    return " and ".join(f"{text} on {' and '.join(ranks)}" for text, ranks in texts.items())


def of_values(name: str, steps: Sequence[Step], ranks: Sequence[int], on: str) -> str:
    """The verdict where a gradient is no weighted sum of anything."""
    got = [steps[rank].after[name] for rank in ranks]
    local = [step.local[name] for step in steps if step.local[name] is not None]
    stacked = torch.stack(local)
    for how, values in (
        ("MAX", stacked.amax(0)),
        ("MIN", stacked.amin(0)),
        ("PRODUCT", stacked.prod(0)),
    ):
        if all(close(gradient, values) for gradient in got):
            return f"were combined by {how} on {on}@. The mean is a SUM, divided by the world size."
    means = [mean.flatten() for mean in expected_gradients(steps).values() if mean is not None]
    means = torch.cat([mean.to(got[0].dtype) for mean in means])
    if all(torch.isin(gradient, means).all() for gradient in got):
        return (
            f"hold means on {on}@, but those of other places. Take a flat tensor apart in the "
            "order in which it was put together."
        )
    return f"are wrong on {on}@, and no sum of the ranks' gradients either."


def not_sent(steps: Sequence[Step]) -> str:
    """That not all bytes of the gradients were sent, and why perhaps; empty if they were."""
    gradients = [g for g in steps[0].local.values() if g is not None]
    needed = sum(g.numel() * g.element_size() for g in gradients)
    done = sum(event.nbytes for event in steps[0].events)
    if done >= needed:
        return ""
    what = f"Only {done} of {needed} bytes were sent."
    what = what if steps[0].collectives else "No collective was started."
    return f"{what} {steps[0].told}".strip()
