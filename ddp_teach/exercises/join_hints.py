"""What is said about training in ``join``: gradients inside it, and the model after it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_teach.exercises.probe import Finding, ranks_text
from ddp_teach.exercises.shares import batch, number_text, shares
from ddp_teach.exercises.wording import sentence

BY_ACTIVE = (
    "Divided by the {n} still training. Divide by the world size, {size}, as torch's class does "
    "unless told otherwise: every batch of the epoch then counts the same."
)
SENT_AGAIN = (
    "{done}, out of batches, still sends something, its old gradients perhaps. A rank that is done "
    "sends zeros."
)
NOT_AVERAGED = "Inside join gradients are not averaged over the ranks that still train."
SUMMED = "Inside join gradients are summed, not averaged. Divide by the world size."
WRONG = (
    "Inside join a gradient must be the sum over the ranks that still have a batch, divided by the "
    "world size."
)
NOT_THE_SAME = (
    "The steps that others took after its last batch are missing on {stale}. When all are done let "
    "them agree on a rank that trained to the end, and broadcast its parameters and buffers."
)
WRONG_SOURCE = (
    "After join all ranks have the model of {source}, which had run out of batches before the "
    "others. Broadcast from a rank that trained to the end; which one that is differs."
)
MODEL_WRONG = "After join every rank must have the parameters of a rank that trained to the end."
BUFFERS_AFTER = (
    "The buffers after join are not those of a rank that trained to the end. Broadcast them with "
    "the parameters; and where forward broadcasts buffers, take them from a rank that still trains."
)


@dataclass
class Epoch:
    """What one rank saw in an epoch in which rank r has ``counts[r]`` batches: all gradients after
    each of its batches, and the parameters before and after the epoch and the buffer after it."""

    counts: tuple[int, ...]
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How to train: the numbers of batches of all ranks in each epoch. ``micro_batches``: as many
    less one in no_sync before each. ``leave_out``: b is used only in the longest rank's last."""

    epochs: tuple[tuple[int, ...], ...]
    micro_batches: int = 1
    leave_out: bool = False

    def numbers(self, step: int) -> range:
        """The numbers of the micro-batches of a step."""
        return range(step * self.micro_batches, (step + 1) * self.micro_batches)

    def use(self, counts: Sequence[int], step: int) -> str:
        """What is used in a step."""
        return "ac" if self.leave_out and step < max(counts) - 1 else "abc"


def trained_wrongly(evidence: list[list[Epoch]], plan: Plan) -> Iterator[Finding]:
    for number, epochs in enumerate(zip(*evidence, strict=True), 1):
        epoch_text = f"epoch {number}, {batches_text(epochs[0].counts)}"
        for finding in [
            *wrong_gradients(epochs, plan, epoch_text),
            *wrong_model(epochs, plan, epoch_text),
        ]:
            yield finding
            return


def batches_text(counts: Sequence[int]) -> str:
    """ "where the ranks have 1, 2 and 4 batches"."""
    return f"where the ranks have {', '.join(map(str, counts[:-1]))} and {counts[-1]} batches"


def wrong_gradients(epochs: Sequence[Epoch], plan: Plan, where: str) -> Iterator[Finding]:
    """Gradients inside join, over the ranks that still train."""
    counts = epochs[0].counts
    for step in range(max(counts)):
        active = [rank for rank, count in enumerate(counts) if count > step]
        for name in plan.use(counts, step):
            numbers = plan.numbers(step)
            expected = sum(batch(r, n) for r in active for n in numbers) / len(counts)
            got = [epochs[rank].gradients[step][name] for rank in active]
            if all(g is not None and close(g, expected) for g in got):
                continue
            texts = [
                number_text(epochs[r].gradients[step][name]) if r in active else "(done)"
                for r in range(len(counts))
            ]
            wanted = [
                number_text(expected) if r in active else "(done)" for r in range(len(counts))
            ]
            yield Finding(
                gradient_hint(got, active, numbers, len(counts)),
                f"first number of the gradient of {name} in step {step + 1} of {where}",
                tuple(wanted),
                tuple(texts),
            )


def gradient_hint(
    got: Sequence[Tensor | None], active: Sequence[int], numbers: range, size: int
) -> str:
    """From how much of which rank's batches came in."""
    found = [shares(gradient) for gradient in got]
    done = [rank for rank in range(size) if rank not in active]
    again = {r for table in found for r in done if any(table[r])}
    if again:
        return sentence(SENT_AGAIN, done=ranks_text(sorted(again), size))
    parts = {table[rank][n] for table in found for rank in active for n in numbers}
    if parts == {round(1 / len(active), 3)} and done:
        return BY_ACTIVE.format(n=len(active), size=size)
    if parts == {1.0}:
        return SUMMED
    own = {
        (table[rank][n], sum(map(sum, table)))
        for table, rank in zip(found, active, strict=True)
        for n in numbers
    }
    if own == {(1.0, float(len(numbers)))}:
        return NOT_AVERAGED
    return WRONG


def wrong_model(epochs: Sequence[Epoch], plan: Plan, where: str) -> Iterator[Finding]:
    """Parameters and buffers after join."""
    counts, size = epochs[0].counts, len(epochs)
    ends = [after_steps(plan, counts, count) for count in counts]  # of each rank's own last batch
    for name in "abc":
        models = [epochs[0].before[name] - end for end in (e[name] for e in ends)]
        expected = epochs[0].before[name] - after_steps(plan, counts, max(counts))[name]
        got = [epoch.after[name] for epoch in epochs]
        if all(close(value, expected) for value in got):
            continue
        stale = [r for r in range(size) if not close(got[r], expected)]
        hint = MODEL_WRONG
        if all(close(got[r], models[r]) for r in stale) and len(stale) < size:
            hint = NOT_THE_SAME.format(stale=ranks_text(stale, size))
        elif sources := [r for r in range(size) if all(close(value, models[r]) for value in got)]:
            hint = WRONG_SOURCE.format(source=f"rank {sources[0]}")
        yield Finding(
            hint,
            f"first number of {name} after join in {where}",
            (number_text(expected),) * size,
            tuple(map(number_text, got)),
        )
        return
    calls = epochs[0].before["calls"] + max(counts) * plan.micro_batches
    if any(not close(epoch.after["calls"], calls) for epoch in epochs):
        yield Finding(
            BUFFERS_AFTER,
            f"a buffer that counts forward passes, after join in {where}",
            (number_text(calls),) * size,
            tuple(number_text(e.after["calls"]) for e in epochs),
        )


def close(got: Tensor, expected: Tensor) -> bool:
    """Equal within rounding."""
    return torch.allclose(got, expected, 1e-3, 1e-3)


def after_steps(plan: Plan, counts: Sequence[int], steps: int) -> dict[str, Tensor]:
    """By parameter: how far gradient descent with learning rate 1 goes in so many steps."""
    total = {name: torch.zeros_like(batch(0, 0)) for name in "abc"}
    for step in range(steps):
        for name in plan.use(counts, step):
            for rank in (rank for rank, count in enumerate(counts) if count > step):
                total[name] += sum(batch(rank, n) for n in plan.numbers(step)) / len(counts)
    return total
