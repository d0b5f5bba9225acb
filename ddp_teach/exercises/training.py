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
    training = Training(learner, wrapper, module, reference, loss_of, advice)
    steps = []
    for iteration in range(iterations):
        if iteration % zero_every == 0:
            optimizer.zero_grad(set_to_none)
        numbers = range(iteration * micro_batches, (iteration + 1) * micro_batches)
        late = iteration % world_size if late_ranks else None
        steps.append(training.step(iteration, [data(rank, number) for number in numbers], late))
        with _disable_current_modes():  # ours, not the learner's; quicker without a look at it
            optimizer.step()
    return steps


@dataclass
class Training:
    """A wrapper in training, with a copy of its module that stays out of its reach."""

    learner: Learner
    wrapper: nn.Module
    module: nn.Module
    reference: nn.Module
    loss_of: Callable[[Tensor], Tensor]
    advice: str

    def step(self, iteration: int, batches: list[Tensor], late: int | None) -> Step:
        """One iteration but for the optimizer's step."""
        with _disable_current_modes():
            local, weights = self.local_gradients(batches), values(self.module)
            newest = self.local_gradients(batches[-1:]) if len(batches) > 1 else {}
            step = Step(local, gradients(self.module), newest=newest, late=late)
        is_late = dist.get_rank() == late
        for x in batches:
            step.events += self.backward(x, iteration, is_late)
        step.events += self.synchronise()
        time.sleep(LATE / 2 if is_late else 0)  # its all-reduces are done now, in any case
        with _disable_current_modes():
            step.after, step.tied = gradients(self.module), all_names(self.module)
            step.changed = [n for n, v in values(self.module).items() if not v.equal(weights[n])]
        step.told = "" if iteration else self.advice or likely(self.learner, self.wrapper)
        step.by = moment(self.learner)
        return step

    def backward(self, x: Tensor, iteration: int, is_late: bool) -> list[Event]:
        """The events of a backward pass; the forward pass comes before it."""
        self.learner.doing(f"the forward pass of iteration {iteration + 1}", self.advice)
        loss = self.loss_of(self.wrapper(x))
        time.sleep(LATE if is_late else 0)
        self.learner.doing(f"the backward pass of iteration {iteration + 1}", self.advice)
        self.learner.events.clear()
        loss.backward()
        return list(self.learner.events)

    def synchronise(self) -> list[Event]:
        """The events of ``sync_gradients()``, where that is called."""
        self.learner.events.clear()
        self.learner.after_backward(self.wrapper, self.advice)
        return list(self.learner.events)

    def local_gradients(self, batches: list[Tensor]) -> Gradients:
        """What these batches alone give, with the values that the module has, found without it."""
        self.reference.load_state_dict(self.module.state_dict())
        self.reference.zero_grad()
        for x in batches:
            self.loss_of(self.reference(x)).backward()
        return gradients(self.reference)


def moment(learner: Learner) -> str:
    """When gradients must be there."""
    if learner.step == "average":
        return "sync_gradients() returns"
    return "backward() returns; nothing of yours is called after it"


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
