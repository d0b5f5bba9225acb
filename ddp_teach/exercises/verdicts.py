"""What a gradient's mixture means: the mistake, in words.

Every text goes on after the word "gradients"; ``@`` stands where the iteration may be told.
"""

from collections.abc import Sequence

from ddp_teach.exercises.mixture import Mixture
from ddp_teach.exercises.probe import ranks_text
from ddp_teach.exercises.ratios import ratio_text
from ddp_teach.exercises.training import Step
from ddp_teach.exercises.wording import some

IN_FLIGHT = (
    "The ranks end with different numbers: was a gradient changed while its all-reduce was under "
    "way? Divide before it starts, or after wait()."
)
LOST = "what had accumulated in .grad before is lost. Average the whole of param.grad."


SAME_EVERY_TIME = (
    "Each of {count} collectives sent {numel} numbers, the same parameter every time. A lambda "
    "made in a loop sees the loop's last value: use what the hook is called with."
)


def of_mixtures(name: str, mixtures: dict[int, Mixture], steps: Sequence[Step], on: str) -> str:
    """The verdict where it is known for every wrong rank what its gradient is made of."""
    size = len(steps)
    others = [mixture.others(name) for mixture in mixtures.values()]
    rows = {rank: mixture.of_ranks(name, size) for rank, mixture in mixtures.items()}
    if any(others):
        return of_others(name, others, rows, on)
    if all(max(row) - min(row) < 2e-3 * max(map(abs, row)) for row in rows.values()):
        ratios = [sum(row) for row in rows.values()]
        if max(ratios) - min(ratios) < 1e-2 * max(map(abs, ratios)):
            return of_ratio(name, ratios[0], steps, on)
    own = {round(row[rank], 3) for rank, row in rows.items()}
    only_own = all(sum(map(abs, row)) == abs(row[rank]) for rank, row in rows.items())
    if only_own and len(own) == 1:
        return own_text(own.pop(), list(rows), steps, on)
    sources = {tuple(row) for row in rows.values()}
    row = next(iter(sources))
    if len(sources) == 1 and sorted(row)[-2:] == [0.0, 1.0]:
        source = row.index(1.0)
        return (
            f"are those of rank {source} on {on}@: copied from one rank, not averaged over "
            "all. Every rank's data counts: use an all-reduce."
        )
    if idle := alone(rows, size):
        return f"are {mixed(rows, on)}@: {idle} takes no part. All ranks must."
    added = [[w - (rank == r) for r, w in enumerate(row)] for rank, row in rows.items()]
    if all(abs(weight - 1 / size) < 5e-3 for row in added for weight in row):
        return f"are the local ones plus the mean on {on}@: the mean replaces the local gradient."
    text = f"are {mixed(rows, on)}@; the mean is {1 / size:.3g} of every rank."
    return text if len(sources) == 1 else f"{text} {IN_FLIGHT}"


def of_ratio(name: str, ratio: float, steps: Sequence[Step], on: str) -> str:
    """For a gradient that is ``ratio`` times the mean of what this iteration adds."""
    before = steps[0].before[name]
    if abs(ratio - 1) < 0.01 and before is not None and before.any():
        return f"are the new ones only on {on}@: {LOST}"
    return ratio_text(ratio, len(steps), on)


def alone(rows: dict[int, list[float]], size: int) -> str:
    """The ranks that have nothing of the others, nor the others of them, if those have more."""
    ranks = [
        rank
        for rank, row in rows.items()
        if sum(map(bool, row)) == 1 and not any(rows[r][rank] for r in rows if r != rank)
    ]
    others = [rank for rank in rows if rank not in ranks]
    together = len(rows) == size and len(others) > 1
    return ranks_text(ranks, size) if ranks and together else ""


def own_text(weight: float, ranks: list[int], steps: Sequence[Step], on: str) -> str:
    """For a gradient that holds ``weight`` times the rank's own and nothing of the others'."""
    size = len(steps)
    if len(ranks) < size:
        rest = ranks_text([rank for rank in range(size) if rank not in ranks], size)
        return (
            f"are the mean on {rest} only@; {on} still holds its own local gradient. All ranks "
            "need the result in .grad, which must not be filled before wait() has returned."
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
    if kinds == {"newest"}:
        return f"are those of the last micro-batch only on {on}@: {LOST}"
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


def not_sent(steps: Sequence[Step]) -> str:
    """That not all bytes of the gradients were sent, and why perhaps; empty if they were."""
    gradients = [g for g in steps[0].local.values() if g is not None]
    sizes = {gradient.numel() for gradient in gradients}
    sent = [event.tensors[0][0] for event in steps[0].events if event.collective]
    if len(set(sent)) == 1 < len(sizes) and len(sent) == len(gradients):
        return SAME_EVERY_TIME.format(count=len(sent), numel=sent[0])
    needed = sum(g.numel() * g.element_size() for g in gradients)
    done = sum(event.nbytes for event in steps[0].events)
    if done >= needed:
        return ""
    what = f"Only {done} of {needed} bytes were sent."
    what = what if steps[0].collectives else "No collective was started."
    return f"{what} {steps[0].told}".strip()
