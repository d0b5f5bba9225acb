"""Step overlap: all-reduces start while backward still computes, and are done when it returns.

That the mean is there when ``backward()`` returns is tested by the probes of step average, which
from this step on call nothing after backward. Here it is looked at when things happen.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_teach.exercises import models
from ddp_teach.exercises.average import trained
from ddp_teach.exercises.probe import Event, Finding, Learner, Probe
from ddp_teach.exercises.training import squares

LAYERS = 4
SMALL = {"bucket_cap_mb": 300 / 2**20}  # less than two layers of ``models.layers``, 288 bytes each
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
        self.layers = nn.ModuleList(nn.Linear(models.WIDTH, models.WIDTH) for _ in range(LAYERS))
        self.learner = [learner]  # in a list, so that nothing is copied or registered

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(Passed.apply(x, self.learner[0], f"layer {number}"))
        return x


def watch_backward(learner: Learner, iterations: int = 3) -> list[Event]:
    """What happened during the last of several backward passes: a wrapper may learn from the first
    in which order gradients come."""
    model = Watched(learner)
    wrapper = learner.wrap(model, **SMALL)
    for iteration in range(iterations):
        x = models.data(dist.get_rank(), iteration).requires_grad_()  # so that layer 0 is passed
        learner.doing(f"the forward pass of iteration {iteration + 1}")
        loss = squares(wrapper(x))
        learner.events.clear()
        learner.doing(f"the backward pass of iteration {iteration + 1}")
        loss.backward()
        wrapper.zero_grad()
    return list(learner.events)


def judge_order(evidence: Sequence[list[Event]]) -> Iterator[Finding]:
    """Whether anything was under way while there was still something to compute."""
    events = evidence[0]
    ends = max(i for i, event in enumerate(events) if event.kind == "passed")
    started = sum(event.collective for event in events)
    early = sum(event.collective for event in events[:ends])
    expected = tuple("one at least" for _ in evidence)
    counts = tuple(f"{count_before_end(e)} of {count(e)}" for e in evidence)
    where = "collectives started before backward is through with the last layer"
    if not early:
        yield Finding(
            f"No all-reduce starts before backward ends: all {started} start after the last "
            "gradient is there, so nothing overlaps. Start each in a hook of its parameter "
            "(register_post_accumulate_grad_hook), while backward goes on to the next.",
            where,
            expected,
            counts,
        )
    elif not under_way(events[:ends]):
        yield Finding(
            "Backward stands still during every all-reduce: each is waited for at once, so "
            f"nothing overlaps. {ASYNC}"
        )


def count(events: Sequence[Event]) -> int:
    """How many collectives were started."""
    return sum(event.collective for event in events)


def count_before_end(events: Sequence[Event]) -> int:
    """How many of them before backward was through with its last layer."""
    ends = max(i for i, event in enumerate(events) if event.kind == "passed")
    return count(events[:ends])


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
