"""What the gradient probes run in a rank: a few steps of training, with everything written down.

``train`` returns a list of ``Step``: for every parameter the gradient that this rank's data alone
would give (from a copy of the model, out of the wrapper's reach), what stood in ``.grad`` before,
and what stands there afterwards. From those of all ranks ``explain.py`` concludes what was done.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_teach.exercises.probe import Learner, values_of

Gradients = dict[str, "Tensor | None"]  # by parameter name
LATE = 0.04  # seconds: much longer than an all-reduce takes


@dataclass
class Step:
    """One iteration on one rank. ``local``: the gradient of this rank's data alone, summed over
    the micro-batches. ``before``: what stood in ``.grad`` when the iteration began.
        ``changed`` names the parameters whose values were not the same afterwards. ``late`` is the rank
    that came late."""

    local: Gradients
    before: Gradients
    after: Gradients
    changed: list[str] = field(default_factory=list)
    late: int | None = None


def squares(output: Tensor) -> Tensor:
    """A loss whose gradients depend on the data and on the weights."""
    return output.double().square().sum(1).mean()


def train(
    learner: Learner,
    build: Callable[[], nn.Module],
    data: Callable[[int, int], Tensor],
    loss_of: Callable[[Tensor], Tensor] = squares,
    iterations: int = 3,
    micro_batches: int = 1,
    set_to_none: bool = True,
    zero_every: int = 1,
    late_ranks: bool = False,
    **options: float,
) -> list[Step]:
    """Train ``build()``, wrapped, on ``data(rank, number of the micro-batch)``.

    Gradients are zeroed every ``zero_every`` iterations. With ``late_ranks``, every iteration a
    different rank comes late to its backward pass: the all-reduces of the others can't be done
    then unless they are waited for.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module, reference = build(), build()
    learner.doing("wrapping the model")
    wrapper = learner.wrap(module, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps = []
    for iteration in range(iterations):
        if iteration % zero_every == 0:
            optimizer.zero_grad(set_to_none)
        late = iteration % world_size if late_ranks else None
        before, weights = gradients(module), values(module)
        reference.load_state_dict(module.state_dict())
        reference.zero_grad()
        for micro_batch in range(micro_batches):
            x = data(rank, iteration * micro_batches + micro_batch)
            loss_of(reference(x)).backward()
            learner.doing(f"the forward pass of iteration {iteration + 1}")
            loss = loss_of(wrapper(x))
            if rank == late:
                time.sleep(LATE)
            learner.doing(f"the backward pass of iteration {iteration + 1}")
            loss.backward()
        learner.after_backward(wrapper)
        if rank == late:  # here an all-reduce is done soon, waited for or not
            time.sleep(LATE / 2)
        after = gradients(module)
        changed = [name for name, value in values(module).items() if not value.equal(weights[name])]
        steps.append(Step(gradients(reference), before, after, changed, late))
        optimizer.step()
    return steps


def gradients(module: nn.Module) -> Gradients:
    """Copies of all gradients, by the parameter's name."""
    return {name: values_of(param.grad) for name, param in module.named_parameters()}


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, by name."""
    return {name: values_of(param) for name, param in module.named_parameters()}
