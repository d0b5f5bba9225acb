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
from torch.utils._python_dispatch import _disable_current_modes

from ddp_teach.exercises.probe import Event, Learner, values_of

Gradients = dict[str, "Tensor | None"]  # by parameter name
LATE = 0.03  # seconds: much longer than an all-reduce takes


@dataclass
class Step:
    """One iteration on one rank."""

    local: Gradients  # of this rank's data alone, summed over the micro-batches
    before: Gradients  # what stood in .grad when the iteration began
    after: Gradients
    changed: list[str]  # parameters whose values were not the same after backward
    events: list[Event]  # from backward on
    late: int | None = None  # the rank that came late
    told: str = ""  # what a hint may add about gradients that were not sent
    tied: dict[str, list[str]] = field(default_factory=dict)  # by name: all names of the parameter

    @property
    def collectives(self) -> int:
        """How many collectives the rank started."""
        return sum(event.collective for event in self.events)


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
    advice: str = "",
    **options: float,
) -> list[Step]:
    """Train ``build()``, wrapped, on ``data(rank, number of the micro-batch)``.

    Gradients are zeroed every ``zero_every`` iterations. With ``late_ranks``, every iteration a
    different rank comes late to its backward pass: the all-reduces of the others can't be done
    then unless they are waited for. ``advice`` is for the case that the learner's code raises.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module, reference = build(), build()
    wrapper = learner.wrap(module, advice=advice, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    steps = []
    for iteration in range(iterations):
        if iteration % zero_every == 0:
            optimizer.zero_grad(set_to_none)
        late = iteration % world_size if late_ranks else None
        numbers = range(iteration * micro_batches, (iteration + 1) * micro_batches)
        batches = [data(rank, number) for number in numbers]
        with _disable_current_modes():  # ours, not the learner's; quicker without a look at it
            before, weights = gradients(module), values(module)
            local = local_gradients(reference, module, batches, loss_of)
        events = []
        for x in batches:
            learner.doing(f"the forward pass of iteration {iteration + 1}", advice)
            loss = loss_of(wrapper(x))
            time.sleep(LATE if rank == late else 0)
            learner.doing(f"the backward pass of iteration {iteration + 1}", advice)
            learner.events.clear()
            loss.backward()
            events += learner.events
        learner.events.clear()
        learner.after_backward(wrapper, advice)
        events += learner.events
        time.sleep(LATE / 2 if rank == late else 0)  # its all-reduces are done now, in any case
        with _disable_current_modes():
            changed = [n for n, value in values(module).items() if not value.equal(weights[n])]
            told = advice or likely(learner, wrapper)
            found = local, before, gradients(module), changed, events, late, told
            steps.append(Step(*found, all_names(module)))
            optimizer.step()
    return steps


def local_gradients(
    reference: nn.Module, module: nn.Module, batches: list[Tensor], loss_of: Callable
) -> Gradients:
    """What these batches alone give, with the values that ``module`` has, found without it."""
    reference.load_state_dict(module.state_dict())
    reference.zero_grad()
    for x in batches:
        loss_of(reference(x)).backward()
    return gradients(reference)


def likely(learner: Learner, wrapper: nn.Module) -> str:
    """A likely reason if gradients were not sent."""
    if learner.step == "average" and not hasattr(wrapper, "sync_gradients"):
        return "There is no method sync_gradients() to call."
    if learner.step != "average" and hasattr(wrapper, "sync_gradients"):
        return "Nobody calls sync_gradients() in this step: backward() has to do it, by hooks."
    if learner.accepts("bucket_cap_mb"):
        return "A bucket that is not full when backward ends has to travel, too."
    return ""


def gradients(module: nn.Module) -> Gradients:
    """Copies of all gradients, by the parameter's name."""
    return {name: values_of(param.grad) for name, param in module.named_parameters()}


def all_names(module: nn.Module) -> dict[str, list[str]]:
    """By name: all names that this parameter has."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return {these[0]: these for these in names.values()}


def values(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, by name."""
    return {name: values_of(param) for name, param in module.named_parameters()}
