"""Which parameters the wrapper looks after, and whether the model still has the same ones.

A parameter that is unfrozen, replaced or added after wrapping has no hook, so its gradient would
stay local without a word. ``ModelWatch`` notices, at a cost that allows to look after every step.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn


def managed_parameters(
    module: nn.Module, ignored: Collection[str]
) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Name, parameter, and whether its gradient is sparse, for all that require grad; a tied
    parameter comes once."""
    seen = set()
    for prefix, owner in module.named_modules():
        sparse = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse
        for name, param in owner.named_parameters(prefix, recurse=False):
            # torch's list of names to ignore has ".weight" for a parameter of the root
            ignore = name in ignored or f".{name}" in ignored
            if param.requires_grad and not ignore and param not in seen:
                seen.add(param)
                yield name, param, sparse


class ModelWatch:
    """Called with no arguments: a message if ``module`` has a parameter that requires grad and was
    not there, or was frozen, when it was wrapped; ``None`` otherwise."""

    def __init__(self, module: nn.Module, ignored: Collection[str]):
        self.module, self.ignored = module, ignored
        self.managed = {p for _, p, _ in managed_parameters(module, ignored)}
        self._look()

    def _look(self) -> None:
        self.frozen = [p for p in self.module.parameters() if not p.requires_grad]
        # named_parameters() would say the same, but takes ten times as long
        modules = list(self.module.modules())
        self.registries = [r for m in modules for r in (m._parameters, m._modules)]
        self.entries = self._registered()

    def _registered(self) -> list[Any]:
        return [*chain.from_iterable(r.values() for r in self.registries)]

    def __call__(self) -> str | None:
        now = self._registered()
        same = len(now) == len(self.entries) and all(map(is_, now, self.entries))
        if same and not any(p.requires_grad for p in self.frozen):
            return None
        for name, param, _ in managed_parameters(self.module, self.ignored):
            if param not in self.managed:
                return (
                    f"Parameter {name} was added, replaced or unfrozen after the model was "
                    "wrapped, so its gradient is not averaged over the ranks. Wrap the model again."
                )
        self._look()
        return None


class Outputs:
    """Called after a forward pass: all tensors through which a backward pass may come in. These are
    the tensors in what ``module`` returned, and those it keeps (an auxiliary loss) as attributes.
    """

    def __init__(self, module: nn.Module):
        self.module, self.places = module, None

    def __call__(self, returned: Any) -> Sequence[Tensor]:
        if self.places is None:  # the first forward pass shows where tensors are kept
            self.places = [
                (vars(owner), name)
                for owner in self.module.modules()
                for name, value in vars(owner).items()
                if isinstance(value, Tensor) and value.grad_fn is not None
            ]
        if isinstance(returned, Tensor) and not self.places:
            return (returned,)
        return tensors_in([returned, *(kept.get(name) for kept, name in self.places)])


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
    tensors, parts, seen = [], [output], set()
    while parts:
        part = parts.pop()
        if isinstance(part, Tensor):
            tensors.append(part)
        elif id(part) not in seen:  # what refers to itself is looked into once
            seen.add(id(part))
            if is_dataclass(part) and not isinstance(part, type):
                parts += [getattr(part, field.name, None) for field in fields(part)]
            elif isinstance(part, dict):
                parts += part.values()
            elif isinstance(part, list | tuple):
                parts += part
    return tensors
