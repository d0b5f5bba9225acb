"""Step join: inside ``with wrapper.join():`` ranks may have different numbers of batches."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_teach.exercises.contexts import Interruption, context_probe
from ddp_teach.exercises.engine import Journal
from ddp_teach.exercises.probe import Finding, Learner, Probe, ranks_text, values_of
from ddp_teach.exercises.shares import (
    SMALLEST,
    Branches,
    Seen,
    Trial,
    batch,
    differences,
    number_text,
    shares,
)

RECIPE = (
    "Write it as a generator under @contextlib.contextmanager: note that join is on, yield, then "
    "answer the other ranks until all are done."
)
RULE = (
    "A rank without batches stays in join and starts every collective that the others start, with "
    "zeros for gradients. Before every step all ranks count who still has one; at zero all leave."
)
NO_OP = (
    "Join ends at once on {done}, out of batches, while {active} still trains and waits for it. "
    f"{RULE}"
)
LEFT_EARLY = "{done} left join while {active} still had batches. " + RULE
NEVER_LEAVES = (
    "All ranks are out of batches, but {done} waits in join for one more step. Let all ranks "
    "count, with the same all-reduce, who still has a batch; at 0 all leave."
)
BUFFERS = (
    "The forward pass of {active} starts a broadcast (of buffers, most likely) that {done}, out of "
    "batches, does not answer. " + RULE
)
BUCKETS = (
    "{done} is out of batches and answers fewer collectives than a step of {active} starts: one "
    "all-reduce for every bucket, and whatever else forward and backward send. " + RULE
)
TOO_MANY = (
    "{done} is out of batches and starts a collective that {active} does not start in its step. "
    "What is answered depends on the step: one in no_sync sends no gradients. " + RULE
)
BY_ACTIVE = (
    "Divided by the {n} still training. Divide by the world size, {size}, as torch's class does "
    "unless told otherwise: every batch of the epoch then counts the same."
)
SENT_AGAIN = (
    "Old gradients of {done}, out of batches, came in again. A rank that is done sends zeros."
)
NOT_AVERAGED = "Inside join gradients are not averaged over the ranks that still train."
SUMMED = "Inside join gradients are summed, not averaged. Divide by the world size."
ALONE = (
    "A step outside join is wrong after one inside. Whatever join changes must be as before when "
    "its block ends."
)
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
SWALLOWED = (
    "join swallows an exception that is raised inside it. Let it through, without answering the "
    "other ranks: they may never come."
)
LET_GO = (
    "An exception leaves the block: let it go on. Answering the other ranks is only for a rank "
    "that is done with its batches."
)


class Counting(Branches):
    """Counts its forward passes in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, use: str = "abc") -> Tensor:
        self.calls += 1
        return super().forward(x, use)


ENTERING, LEAVING, LEFT = "entering join", "leaving join", "what comes after join"


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


def train_unevenly(learner: Learner, plan: Plan, **options: Any) -> list[Epoch]:
    """A few epochs in join, with plain gradient descent."""
    wrapper = learner.wrap(Counting(), **options)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    return [
        train_epoch(learner, wrapper, optimizer, plan, Epoch(counts), f"epoch {number}")
        for number, counts in enumerate(plan.epochs, 1)
    ]


def train_epoch(
    learner: Learner, wrapper: Any, optimizer: Any, plan: Plan, epoch: Epoch, where: str
) -> Epoch:
    """One epoch; every rank leaves it when all have left join."""
    rank = dist.get_rank()
    own = epoch.counts[rank]
    epoch.before = states(wrapper.module)
    learner.doing(f"{ENTERING} in {where}", RECIPE)
    with wrapper.join():
        for step in range(own):
            optimizer.zero_grad()
            for number in plan.numbers(step):
                what = f"batch {step + 1} of {own} in join, {where}"
                last = number == plan.numbers(step)[-1]
                with nullcontext() if last else wrapper.no_sync():
                    learner.doing(f"the forward pass of {what}", RULE)
                    output = wrapper(batch(rank, number), use=plan.use(epoch.counts, step))
                    learner.doing(f"the backward pass of {what}", RULE)
                    output.backward()
            named = wrapper.module.named_parameters()
            epoch.gradients.append({name: values_of(p.grad) for name, p in named})
            optimizer.step()
        learner.doing(f"{LEAVING} after batch {own} of {own} in {where}", RULE)
    learner.doing(LEFT, RULE)
    learner.meet()
    epoch.after = states(wrapper.module)
    return epoch


def states(module: Counting) -> dict[str, Tensor]:
    """Copies of parameters and buffers."""
    return {name: value.clone() for name, value in module.state_dict().items()}


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
            if all(g is not None and torch.allclose(g, expected, 1e-3, 1e-3) for g in got):
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
        return SENT_AGAIN.format(done=ranks_text(sorted(again), size))
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


def sentence(hint: str, **ranks: str) -> str:
    """The hint filled in, with a capital letter."""
    text = hint.format(**ranks)
    return text[0].upper() + text[1:]


def why_stopped(journals: Sequence[Journal]) -> str:
    """What the ranks' journals tell of a launch that came to no good end inside join."""
    left = [r for r, journal in enumerate(journals) if journal.doing == LEFT]
    leaving = [r for r, journal in enumerate(journals) if journal.doing.startswith(LEAVING)]
    active = [r for r in range(len(journals)) if r not in left and r not in leaving]
    if left and active:
        answered = not journals[left[0]].story[-2].startswith(LEAVING)
        hint, done = LEFT_EARLY if answered else NO_OP, left[0]
    elif leaving and active:
        hint, done = answered_wrongly(journals[leaving[0]], journals[active[-1]]), leaving[0]
    elif leaving:
        return NEVER_LEAVES.format(done=f"rank {leaving[0]}")
    else:
        return RULE
    return sentence(hint, done=f"rank {done}", active=f"rank {active[-1]}")


def answered_wrongly(done: Journal, active: Journal) -> str:
    """Where the collectives of a rank that is done differ from those of one that still trains."""
    pairs = list(zip(done.started, active.started, strict=False))
    place = next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))
    in_join = next(k for k, entry in enumerate(active.story) if entry.startswith(ENTERING))
    of_steps = {entry for entry in active.story[in_join:] if entry in active.started}
    if place == len(active.started):
        return TOO_MANY
    if active.started[place].startswith("broadcast"):
        return BUFFERS
    places = [k for k, entry in enumerate(active.story) if entry in active.started]
    if not active.story[places[place] - 1].startswith("the forward pass"):
        return BUCKETS
    too_many = place < len(done.started) and done.started[place] in of_steps
    return TOO_MANY if too_many else LEFT_EARLY


UNEVEN = Plan(((1, 2, 4), (3, 1, 2), (2, 0, 1)))
ACCUMULATED = Plan(((1, 2, 3),), micro_batches=2)
LEFT_OUT = Plan(((1, 2, 3),), leave_out=True)


def trained(name: str, plan: Plan, **options: Any) -> Probe:
    """A probe that trains by the plan."""
    run = partial(train_unevenly, plan=plan, **options)
    return Probe(name, run, partial(trained_wrongly, plan=plan), (3,), why_stopped)


def interrupt(learner: Learner) -> tuple[bool, list[Seen]]:
    """Whether an exception came through join, and how training goes on after it."""
    trial = Trial(learner)
    came_through = False
    try:
        with trial.wrapper.join():
            trial.step(0, "a batch in join", advice=RULE)
            learner.doing("leaving join because of an exception", LET_GO)
            raise Interruption("raised inside join by this check, on purpose")
    except Interruption:
        came_through = True
    trial.forget()
    for number, before in ((1, "an exception in join"), (2, "join")):
        trial.step(number, f"a step after {before}", advice=ALONE)
        trial.look(f"in a step after {before}", averaged=True)
        trial.forget()
        learner.doing("an empty join", RULE)
        with trial.wrapper.join():
            pass
    return came_through, trial.seen


def not_as_before(evidence: list[tuple[bool, list[Seen]]]) -> Iterator[Finding]:
    if not all(came_through for came_through, _ in evidence):
        yield Finding(SWALLOWED)
        return
    for difference in differences([seen for _, seen in evidence]):
        yield difference.finding(ALONE)
        return


PROBES = [
    context_probe("join", RECIPE),
    trained("ranks with different numbers of batches", UNEVEN, bucket_cap_mb=SMALLEST),
    trained("the same with find_unused_parameters", LEFT_OUT, find_unused_parameters=True),
    trained("the same with a micro-batch in no_sync before each", ACCUMULATED),
    Probe("an exception inside join, and steps outside it", interrupt, not_as_before, (2,)),
]
