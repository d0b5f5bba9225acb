"""Step average: the mean gradient is on every rank, once ``sync_gradients()`` has been called."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ddp_teach.exercises import models
from ddp_teach.exercises.explain import explain
from ddp_teach.exercises.probe import Learner, Probe
from ddp_teach.exercises.training import train


def trained(name: str, build: Callable[[], nn.Module], **how: Any) -> Probe:
    """A probe that trains ``build()`` and looks at every gradient in every iteration."""
    return Probe(name, partial(train_on, build=build, **how), explain)


def train_on(learner: Learner, build: Callable, data: Callable = models.data, **how: Any):
    """The gradients of a few iterations, see ``train``."""
    return train(learner, build, data, **how)


def plain_sum(output: Tensor) -> Tensor:
    """A loss that makes the gradient of a weight equal to its input."""
    return output.sum()


FROZEN = "A frozen parameter never gets a gradient, its .grad is None: leave it out."
TIED = "A tied weight is one parameter with two names, and module.parameters() lists it once."
DTYPES = "Gradients of several dtypes don't fit into one tensor."

PROBES = [
    trained(
        "one layer of two parameters; in every iteration another rank is late",
        models.Weights,
        data=models.whole_numbers,
        loss_of=plain_sum,
        late_ranks=True,
    ),
    trained(
        "three layers; in every iteration another rank is late", models.layers, late_ranks=True
    ),
    trained("tied weights", models.Tied, set_to_none=False, advice=TIED),
    trained("a frozen layer between two that learn", models.Frozen, advice=FROZEN),
    trained("parameters of several dtypes", models.Dtypes, advice=DTYPES),
    trained("batch norm and buffers", models.Buffers),
    trained("two micro-batches per iteration", models.layers, micro_batches=2),
    trained("gradients zeroed every second iteration", models.Tied, zero_every=2, iterations=4),
]
