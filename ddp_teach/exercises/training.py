"""What the gradient probes run in a rank: a few steps of training, with everything written down.

``train`` returns a list of ``Step``: for every parameter the gradient that this rank's data alone
would give (from a copy of the model, out of the wrapper's reach), what stood in ``.grad`` before,
and what stands there afterwards. From those of all ranks ``explain.py`` concludes what was done.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ddp_teach.exercises.collectives import Event
from ddp_teach.exercises.probe import Learner, values_of

Gradients = dict[str, "Tensor | None"]  # by parameter name
LATE = 0.03  # seconds: much longer than an all-reduce takes


@dataclass
class Step:
    """One iteration on one rank."""

    local: Gradients  # of this rank's data alone, summed over the micro-batches
    before: Gradients  # what stood in .grad when the iteration began
    after: Gradients = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)  # parameters with other values than before
    events: list[Event] = field(default_factory=list)  # from backward on
    newest: Gradients = field(default_factory=dict)  # of the last micro-batch, if there are several
    late: int | None = None  # the rank that came late
    told: str = ""  # what a hint may add about gradients that were not sent
    by: str = "backward() returns"  # when gradients must be there
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
        numbers = range(iteration * micro_batches, (iteration + 1) * micro_batches)
        batches = [data(rank, number) for number in numbers]
        with _disable_current_modes():  # ours, not the learner's; quicker without a look at it
            step, weights = begin(reference, module, batches, loss_of), values(module)
        step.late = iteration % world_size if late_ranks else None
        for x in batches:
            doing = partial(tell, learner, iteration, advice)
            step.events += backward(learner, wrapper, x, loss_of, doing, rank == step.late)
        step.events += synchronise(learner, wrapper, advice)
        time.sleep(LATE / 2 if rank == step.late else 0)  # its all-reduces are done now
        with _disable_current_modes():
            step.after, step.tied = gradients(module), all_names(module)
            step.changed = [n for n, v in values(module).items() if not v.equal(weights[n])]
            step.told = "" if iteration else advice or likely(learner, wrapper)
            step.by = moment(learner)
            optimizer.step()
        steps.append(step)
    return steps


def begin(
    reference: nn.Module, module: nn.Module, batches: list[Tensor], loss_of: Callable
) -> Step:
    """What is known before the learner's code runs."""
    local = local_gradients(reference, module, batches, loss_of)
    several = len(batches) > 1
    newest = local_gradients(reference, module, batches[-1:], loss_of) if several else {}
    return Step(local, gradients(module), newest=newest)


def tell(learner: Learner, iteration: int, advice: str, what: str) -> None:
    learner.doing(f"the {what} pass of iteration {iteration + 1}", advice)


def backward(
    learner: Learner,
    wrapper: nn.Module,
    x: Tensor,
    loss_of: Callable,
    doing: Callable[[str], None],
    is_late: bool,
) -> list[Event]:
    """The events of a backward pass; the forward pass comes before it."""
    doing("forward")
    loss = loss_of(wrapper(x))
    time.sleep(LATE if is_late else 0)
    doing("backward")
    learner.events.clear()
    loss.backward()
    return list(learner.events)


def synchronise(learner: Learner, wrapper: nn.Module, advice: str) -> list[Event]:
    """The events of ``sync_gradients()``, where that is called."""
    learner.events.clear()
    learner.after_backward(wrapper, advice)
    return list(learner.events)


def moment(learner: Learner) -> str:
    """When gradients must be there."""
    if learner.step == "average":
        return "sync_gradients() returns"
    return "backward() returns; nothing of yours is called after it"


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
