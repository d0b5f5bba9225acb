"""Step unused: parameters that a forward pass leaves out, on some ranks or on all of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_teach.exercises.probe import Learner, Probe
from ddp_teach.exercises.shares import SMALLEST, Branches, Seen, Trial, batch
from ddp_teach.exercises.unused_hints import (
    ANEW,
    NO_GRAPH,
    NOT_IN_LOSS,
    ONCE_PER_NODE,
    ZEROS,
    early_use_forgotten,
    left_out_wrongly,
    lost_on_the_way,
    not_kept,
    outputs_missed,
    refused,
)


def takes_the_option(learner: Learner) -> bool:
    return learner.accepts("find_unused_parameters")


PLAN = (  # what the ranks use in each iteration, and how that is told
    (("ac", "abc", "abc"), "where rank 0 leaves out b"),
    (("ac", "ac", "ac"), "where no rank uses b"),
    (("ab", "ab", "abc"), "where only rank 2 uses c"),
    (("bc", "cba", "ab"), "where rank 0 leaves out a and rank 2 leaves out c"),
    (("abc", "abc", "abc"), "where all ranks use all"),
    (("bc", "bc", "c"), "where no rank uses a and rank 2 leaves out b"),
)


def change_what_is_used(learner: Learner, **options: float) -> list[Seen]:
    """Iterations in each of which something else is left out."""
    trial = Trial(learner, find_unused_parameters=True, **options)
    for number, (uses, where) in enumerate(PLAN):
        what = f"iteration {number + 1}, {where}"
        trial.step(number, what, uses[dist.get_rank()], ANEW if number else ZEROS)
        trial.look(f"in {what}", averaged=True)
        trial.forget()
    return trial.seen


def change_with_small_buckets(learner: Learner) -> list[Seen]:
    return change_what_is_used(learner, bucket_cap_mb=SMALLEST)


def use_early(learner: Learner) -> list[Seen]:
    """Parameter b is used in no_sync, by all ranks and then by rank 0, and left out after it."""
    trial = Trial(learner, find_unused_parameters=True)
    for number, early in ((0, "abc"), (2, "abc" if dist.get_rank() == 0 else "ac")):
        who = "all ranks use" if number == 0 else "rank 0 uses"
        with trial.wrapper.no_sync():
            trial.step(number, f"a micro-batch in no_sync, where {who} b", early)
        trial.step(number + 1, "a micro-batch after no_sync, where no rank uses b", "ac")
        trial.look(f"when {who} b in no_sync and nobody after it", averaged=True)
        trial.forget()
    return trial.seen


def keep_gradients(learner: Learner) -> list[Seen]:
    """Three iterations without zero_grad() between them."""
    trial = Trial(learner, find_unused_parameters=True)
    late = "ac" if dist.get_rank() == 0 else "abc"
    plan = (("abc", "all ranks use all"), (late, "rank 0 leaves out b"), ("ac", "no rank uses b"))
    for number, (use, where) in enumerate(plan):
        what = f"iteration {number + 1} without zero_grad(), where {where}"
        trial.step(number, what, use)
        trial.look(f"in {what}", averaged=True)
    return trial.seen


class Nested(Branches):
    """Returns the branches one by one, in a dict, a list and a tuple."""

    def forward(self, x: Tensor, use: str = "") -> dict[str, Any]:
        a, b, c = ((getattr(self, name) * x).sum() for name in "abc")
        return {"first": a, "more": [b, (c, None, 3)]}


def look_at_outputs(learner: Learner) -> list[Seen]:
    """Nested outputs, all of them in the loss and then only one."""
    trial = Trial(learner, module=Nested(), find_unused_parameters=True, bucket_cap_mb=SMALLEST)
    output = trial.forward(0, "a model that returns a dict with a list with a tuple")
    (output["first"] + output["more"][0] + output["more"][1][0]).backward()
    trial.look("when the outputs lie in a dict, a list and a tuple", averaged=True)
    trial.forget()
    only = "a loss that uses one of three outputs"
    trial.forward(1, only, "b", NOT_IN_LOSS.format(name="a"))["more"][0].backward()
    trial.look(f"with {only}", averaged=True)
    return trial.seen


class Residual(Branches):
    """Forty residual connections in a row: each doubles the number of paths through the graph."""

    def forward(self, x: Tensor, use: str = "abc") -> Tensor:
        h = super().forward(x, use)
        for _ in range(40):
            h = h / 2 + h / 2
        return h


def many_paths(learner: Learner) -> list[Seen]:
    """A graph with more paths than anybody can walk, and a forward pass without a graph."""
    trial = Trial(learner, module=Residual(), find_unused_parameters=True)
    trial.step(0, "a model with 40 residual connections", "ac", ONCE_PER_NODE)
    trial.look("in a model with 40 residual connections", averaged=True)
    trial.forget()
    learner.doing("an evaluation under torch.no_grad()", NO_GRAPH)
    with torch.no_grad():
        trial.wrapper(batch(dist.get_rank(), 1))
    trial.step(2, "a step after an evaluation", "ab")
    trial.look("in a step after an evaluation under torch.no_grad()", averaged=True)
    return trial.seen


PROBES = [
    Probe("the constructor", takes_the_option, refused, (3,)),
    Probe("parameters left out, other ones in every iteration", change_what_is_used,
          left_out_wrongly, (3,)),
    Probe("parameters left out, a bucket for each parameter", change_with_small_buckets,
          left_out_wrongly, (3,)),
    Probe("a parameter used only inside no_sync", use_early, early_use_forgotten, (3,)),
    Probe("gradients that are not zeroed", keep_gradients, not_kept, (3,)),
    Probe("outputs of several kinds", look_at_outputs, outputs_missed, (3,)),
    Probe("a model with many residual connections", many_paths, lost_on_the_way, (3,)),
]  # fmt: skip
