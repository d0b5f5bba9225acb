"""Step overlap: all-reduces start while backward still computes, and are done when it returns.

That the mean is there when ``backward()`` returns is tested by the probes of step average, which
from this step on call nothing after backward. Here it is looked at when things happen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddp_teach.exercises import models
from ddp_teach.exercises.average import trained
from ddp_teach.exercises.collectives import Event
from ddp_teach.exercises.probe import Finding, Learner, Probe
from ddp_teach.exercises.training import squares

LAYERS, WIDTH = 4, 512  # more than 1 MiB each: torch's class would cut them into two buckets
A_LAYER = {"bucket_cap_mb": 1.5}  # less than two layers
SMALL = {"bucket_cap_mb": 300 / 2**20}  # less than two layers of ``models.layers``, 288 bytes each
LAST_HOOK = (
    "All {count} collectives start when the last gradient is there, so nothing overlaps. Start "
    "each as soon as its own gradients are there; buckets are sent in their order, so fill them "
    "from the last parameter to the first, as backward goes."
)
ASYNC = "Start it with async_op=True, keep the work it returns, and wait at the end of backward."


class Passed(torch.autograd.Function):
    """The identity; notes when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, learner: Learner, name: str) -> Tensor:
        ctx.learner, ctx.name = learner, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.learner.note("passed", ctx.name)
        return gradient, None, None


class Watched(nn.Module):
    """Four layers; notes when backward is through with each of them, the last one first."""

    def __init__(self, learner: Learner):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.learner = [learner]  # in a list, so that nothing is copied or registered

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(Passed.apply(x, self.learner[0], f"layer {number}"))
        return x


@dataclass
class Backward:
    """What happened during the last of several backward passes: a wrapper may learn from the first
    in which order gradients come."""

    takes_cap: bool
    events: list[Event]


def watch_backward(learner: Learner, iterations: int = 3) -> Backward:
    """Train a few iterations, and watch the last."""
    model = Watched(learner)
    wrapper = learner.wrap(model, **A_LAYER)
    for iteration in range(iterations):
        x = torch.ones(1, WIDTH, requires_grad=True)  # so that layer 0 is passed
        learner.doing(f"the forward pass of iteration {iteration + 1}")
        loss = squares(wrapper(x))
        learner.events.clear()
        learner.doing(f"the backward pass of iteration {iteration + 1}")
        loss.backward()
        wrapper.zero_grad()
    return Backward(learner.accepts("bucket_cap_mb"), list(learner.events))


def judge_order(evidence: Sequence[Backward]) -> Iterator[Finding]:
    """Whether anything was under way while there was still something to compute."""
    events = evidence[0].events
    started = count(events)
    if not started or started == 1 and evidence[0].takes_cap:
        return  # a thread of the learner's own sends; or step buckets looks why there is one only
    expected = tuple("one at least" for _ in evidence)
    counts = tuple(f"{count(before_last(e.events))} of {count(e.events)}" for e in evidence)
    where = "collectives started before backward comes to its last layer"
    if not count(events[: passed(events)[-1]]):
        yield Finding(
            f"No all-reduce starts before backward ends: all {started} start after the last "
            "gradient is there, so nothing overlaps. Start each in a hook of its parameter "
            "(register_post_accumulate_grad_hook), while backward goes on to the next.",
            where,
            expected,
            counts,
        )
    elif not count(before_last(events)):
        yield Finding(LAST_HOOK.format(count=started), where, expected, counts)
    elif not under_way(before_last(events)):
        yield Finding(
            "Backward stands still during every all-reduce: each is waited for at once, so "
            f"nothing overlaps. {ASYNC}"
        )


def count(events: Sequence[Event]) -> int:
    """How many collectives were started."""
    return sum(event.collective for event in events)


def passed(events: Sequence[Event]) -> list[int]:
    """Where backward was through with a layer."""
    return [place for place, event in enumerate(events) if event.kind == "passed"]


def before_last(events: Sequence[Event]) -> Sequence[Event]:
    """What happened before backward was through with all layers but the last."""
    return events[: passed(events)[-2] + 1]


def under_way(events: Sequence[Event]) -> bool:
    """Whether backward ever passed a layer while a collective was under way."""
    open_ones = 0
    for event in events:
        open_ones += event.collective
        open_ones -= event.kind == "wait" and event.name == "wait"
        if event.kind == "passed" and open_ones > 0:
            return True
    return open_ones > 0


PROBES = [
    Probe("four layers, counting what is under way during backward", watch_backward, judge_order),
    trained("two layers, the second used twice", models.Twice),
]
