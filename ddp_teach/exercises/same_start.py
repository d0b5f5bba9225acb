"""Step same_start: after construction every rank holds rank 0's parameters and buffers."""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_teach.exercises import models
from ddp_teach.exercises.probe import Learner, Probe, values_of
from ddp_teach.exercises.starts import Start, compare_starts
from ddp_teach.exercises.training import LATE

CONTENTS = (
    "This model has frozen parameters (requires_grad is False), tied ones, several dtypes, and "
    "buffers of whole numbers and of True and False."
)


class Everything(nn.Module):
    """Parameters that learn, are frozen, tied, of several dtypes; buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.frozen, self.tied = models.Frozen(), models.Tied()
        self.mixed, self.norm = models.Dtypes(), models.Buffers()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.norm(self.tied(self.frozen(x))))


def start(learner: Learner) -> Start:
    """Wrap a model that every rank has made differently; rank 0 comes late."""
    torch.manual_seed(100 + dist.get_rank())
    module = Everything()
    kinds = {name: "buffer" for name, _ in module.named_buffers()}
    for name, param in module.named_parameters():
        kinds[name] = "parameter" if param.requires_grad else "frozen parameter"
    params, before = all_parameters(module), tensors(module)
    learns = {name: param.requires_grad for name, param in params.items()}
    if dist.get_rank() == 0:
        time.sleep(LATE)
    wrapper = learner.wrap(module, advice=CONTENTS)
    events, after = list(learner.events), tensors(module)
    now = all_parameters(module)
    replaced = [name for name, param in now.items() if param is not params[name]]
    switched = [name for name, param in now.items() if param.requires_grad != learns[name]]
    learner.doing("wrapper(x)")
    wrapper(models.data(dist.get_rank(), 0))
    return Start(kinds, before, after, tensors(module), replaced, switched, events)


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters themselves; a tied one under each of its names."""
    return dict(module.named_parameters(remove_duplicate=False))


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, by name."""
    found = [*module.named_parameters(), *module.named_buffers()]
    return {name: values_of(tensor) for name, tensor in found}


PROBES = [Probe("a model that starts differently on every rank", start, compare_starts)]
