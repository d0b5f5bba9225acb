"""Step join: inside ``with wrapper.join():`` ranks may have different numbers of batches."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_teach.exercises.contexts import Interruption, context_probe
from ddp_teach.exercises.join_hints import Epoch, Plan, trained_wrongly
from ddp_teach.exercises.join_stopped import ENTERING, LEAVING, LEFT, RULE, why_stopped
from ddp_teach.exercises.probe import Finding, Learner, Probe, values_of
from ddp_teach.exercises.shares import SMALLEST, Branches, Seen, Trial, batch, differences

RECIPE = (
    "Write it as a generator under @contextlib.contextmanager: note that join is on, yield, then "
    "answer the other ranks until all are done."
)
ALONE = (
    "A step outside join is wrong after one inside. Whatever join changes must be as before when "
    "its block ends."
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


UNEVEN = Plan(((1, 2, 4), (3, 1, 2), (2, 0, 1)))
ACCUMULATED = Plan(((1, 2, 3),), micro_batches=2)
LEFT_OUT = Plan(((1, 2, 3),), leave_out=True)


def trained(name: str, plan: Plan, **options: Any) -> Probe:
    """A probe that trains by the plan."""
    run = partial(train_unevenly, plan=plan, **options)
    return Probe(name, run, partial(trained_wrongly, plan=plan), (3,), why_stopped)


@dataclass
class Interrupted:
    """Whether an exception came through join, whether anything was sent on its way out, and how
    training went on after it."""

    came_through: bool
    answered: bool
    seen: list[Seen]


def interrupt(learner: Learner) -> Interrupted:
    """Raise inside join, then train outside it."""
    trial = Trial(learner)
    came_through, before = False, 0
    try:
        with trial.wrapper.join():
            trial.step(0, "a batch in join", advice=RULE)
            learner.doing("leaving join because of an exception", LET_GO)
            before = len(learner.events)
            raise Interruption("raised inside join by this check, on purpose")
    except Interruption:
        came_through = True
    answered = any(event.collective for event in learner.events[before:])
    trial.forget()
    for number, before in ((1, "an exception in join"), (2, "join")):
        trial.step(number, f"a step after {before}", advice=ALONE)
        trial.look(f"in a step after {before}", averaged=True)
        trial.forget()
        learner.doing("an empty join", RULE)
        with trial.wrapper.join():
            pass
    return Interrupted(came_through, answered, trial.seen)


def not_as_before(evidence: list[Interrupted]) -> Iterator[Finding]:
    if not all(seen.came_through for seen in evidence):
        yield Finding(SWALLOWED)
        return
    if evidence[0].answered:
        yield Finding(LET_GO)
        return
    for difference in differences([seen.seen for seen in evidence]):
        yield difference.finding(ALONE)
        return


PROBES = [
    context_probe("join", RECIPE),
    trained("ranks with different numbers of batches", UNEVEN, bucket_cap_mb=SMALLEST),
    trained("the same with find_unused_parameters", LEFT_OUT, find_unused_parameters=True),
    trained("the same with a micro-batch in no_sync before each", ACCUMULATED),
    Probe("an exception inside join, and steps outside it", interrupt, not_as_before, (3,)),
]
