"""Step same_start: after construction every rank holds rank 0's parameters and buffers."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_teach.exercises import models
from ddp_teach.exercises.mixture import close, high
from ddp_teach.exercises.probe import (
    Event,
    Finding,
    Learner,
    Probe,
    not_waited_for,
    ranks_text,
    same,
    values_of,
)
from ddp_teach.exercises.training import LATE
from ddp_teach.exercises.wording import first_difference, number_texts, some

CONTENTS = (
    "This model has frozen parameters (requires_grad is False), tied ones, several dtypes, and "
    "buffers of whole numbers and of True and False."
)
KEEP = "Copy rank 0's values into the tensors that are there: dist.broadcast(tensor, 0) does that."


class Everything(nn.Module):
    """Parameters that learn, are frozen, tied, of several dtypes; buffers of all kinds."""

    def __init__(self):
        super().__init__()
        self.frozen, self.tied = models.Frozen(), models.Tied()
        self.mixed, self.norm = models.Dtypes(), models.Buffers()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.norm(self.tied(self.frozen(x))))


@dataclass
class Start:
    """What one rank saw: all tensors by name, and what kind each is."""

    kinds: dict[str, str]  # "parameter", "frozen parameter" or "buffer"
    before: dict[str, Tensor]  # before wrapping
    after: dict[str, Tensor]
    after_forward: dict[str, Tensor]  # parameters only
    replaced: list[
        str
    ]  # parameters that are other objects now, or need gradients where they did not
    events: list[Event]


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
    replaced = [
        name
        for name, param in all_parameters(module).items()
        if param is not params[name] or param.requires_grad != learns[name]
    ]
    learner.doing("wrapper(x)")
    wrapper(models.data(dist.get_rank(), 0))
    return Start(kinds, before, after, tensors(module), replaced, events)


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters themselves; a tied one under each of its names."""
    return dict(module.named_parameters(remove_duplicate=False))


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, by name."""
    found = [*module.named_parameters(), *module.named_buffers()]
    return {name: values_of(tensor) for name, tensor in found}


def compare_starts(evidence: Sequence[Start]) -> Iterator[Finding]:
    first = evidence[0]
    if replaced := sorted({name for seen in evidence for name in seen.replaced}):
        yield Finding(
            f"{some(replaced)}: wrapping has put another parameter in place of the one that was "
            f"there, or changed its requires_grad. Tied weights and optimizers lose it. {KEEP}"
        )
        return
    verdicts: dict[str, list[str]] = {}
    for name in first.kinds:
        if not all(same(seen.after[name], first.before[name]) for seen in evidence):
            verdicts.setdefault(verdict(name, evidence), []).append(name)
    for text, names in verdicts.items():
        got = [seen.after[names[0]] for seen in evidence]
        place = first_difference(first.before[names[0]], got)
        yield Finding(
            f"{subject(names, evidence)} {text}",
            f"{names[0]}{list(place) or ''} after wrapping",
            *number_texts(first.before[names[0]], got, place),
        )


def subject(names: Sequence[str], evidence: Sequence[Start]) -> str:
    """The names as a group, if they are all of it that started differently: "buffers"."""
    kinds, before = evidence[0].kinds, evidence[0].before
    differ = {n for n in kinds if not all(same(seen.before[n], before[n]) for seen in evidence)}
    groups = {
        "parameters and buffers": ("parameter", "frozen parameter", "buffer"),
        "parameters": ("parameter", "frozen parameter"),
        "parameters that learn": ("parameter",),
        "frozen parameters": ("frozen parameter",),
        "buffers": ("buffer",),
        "frozen parameters and buffers": ("frozen parameter", "buffer"),
    }
    for group, members in groups.items():
        whole = {name for name, kind in kinds.items() if kind in members}
        if whole & differ <= set(names) <= whole:
            return group
    return some(names)


def verdict(name: str, evidence: Sequence[Start]) -> str:
    """What is wrong with one tensor, as the rest of a sentence."""
    size = len(evidence)
    before, after = ([s.before[name] for s in evidence], [s.after[name] for s in evidence])
    wrong = [rank for rank in range(size) if not same(after[rank], before[0])]
    on = ranks_text(wrong, size)
    if any(tensor.dtype != before[0].dtype for tensor in after):
        return f"have another dtype on {on} than before. {KEEP}"
    if all(same(after[rank], before[rank]) for rank in wrong) and 0 not in wrong:
        return f"are still {on}'s own: {why_own(evidence)}"
    for source in range(1, size):
        if all(same(after[rank], before[source]) for rank in wrong):
            return f"are those of rank {source} on {on}, not those of rank 0."
    if all(close(tensor, before[0], 1e-2) for tensor in after):
        return f"are rank 0's to a few digits only on {on}: they were sent in a smaller dtype."
    mean = sum(tensor.to(high(tensor)) for tensor in before) / size
    for factor, text in ((1, "the mean"), (size, "the sum"), (1 / size, "a part")):
        if all(close(after[r].double(), factor * mean.double(), 2e-2) for r in wrong):
            return f"are {text} of all ranks' on {on}. Rank 0's alone are wanted: a broadcast."
    return f"are neither rank 0's nor their own on {on}. {KEEP}"


def why_own(evidence: Sequence[Start]) -> str:
    """Why a rank may still have its own values."""
    broadcasts = [[e for e in seen.events if e.kind == "broadcast"] for seen in evidence]
    roots = [{event.root for event in events} for events in broadcasts]
    if all(root == {rank} for rank, root in enumerate(roots)):
        return "every rank broadcasts its own. The source must be the same on all ranks: 0."
    right = evidence[0].before
    wrong = [n for n in right if not all(same(seen.after[n], right[n]) for seen in evidence)]
    learn = [n for n in wrong if evidence[0].kinds[n] == "parameter"]  # a forward changes buffers
    if learn and all(same(seen.after_forward[n], right[n]) for n in learn for seen in evidence):
        return "only a forward pass makes them equal. Do it in __init__."
    if not_waited_for(evidence[1].events):
        return "the broadcast was started, but not waited for."
    if not any(event.collective for event in evidence[0].events):
        return "nothing was sent in __init__. Broadcast rank 0's values to all."
    return "they were not broadcast from rank 0, or what came was not copied into them."


PROBES = [Probe("a model that starts differently on every rank", start, compare_starts)]
