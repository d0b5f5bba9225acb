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

OF_EVERY_MODULE = vars(nn.Module()).keys()


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
    """Called with no arguments: a message if a wrapper's module has a parameter that requires grad
    and was not there, or was frozen, when it was wrapped; ``None`` otherwise. ``wrapped`` is the
    wrapper's registry of modules: its only one, "module", may be replaced as well."""

    def __init__(self, wrapped: dict[str, nn.Module], ignored: Collection[str]):
        self.wrapped, self.ignored = wrapped, ignored
        self.managed = {p for _, p, _ in managed_parameters(wrapped["module"], ignored)}
        self._look()

    def _look(self) -> None:
        modules = list(self.wrapped["module"].modules())
        # named_parameters() would say the same, but takes ten times as long
        self.registries = [r for m in modules for r in (m._parameters, m._modules)]
        self.registries.append(self.wrapped)
        self.entries = self._registered()
        params = (p for m in modules for p in m._parameters.values())
        self.frozen = [p for p in params if p is not None and not p.requires_grad]

    def _registered(self) -> list[Any]:
        return [*chain.from_iterable(r.values() for r in self.registries)]

    def __call__(self) -> str | None:
        now = self._registered()
        same = len(now) == len(self.entries) and all(map(is_, now, self.entries))
        if same and not any(p.requires_grad for p in self.frozen):
            return None
        for name, param, _ in managed_parameters(self.wrapped["module"], self.ignored):
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
        self.attributes = [vars(owner) for owner in module.modules()]
        # looked at in every forward pass: layers of torch's own get no new attributes
        others = (m for m in module.modules() if not type(m).__module__.startswith("torch.nn."))
        self.watched = [vars(owner) for owner in others]
        self.size, self.places = -1, []

    def __call__(self, returned: Any) -> Sequence[Tensor]:
        size = sum(map(len, self.watched))
        if size != self.size:  # the first forward pass shows where tensors are or may be kept
            self.size = size
            self.places = [
                (kept, name)
                for kept in self.attributes
                for name, value in kept.items()
                if name not in OF_EVERY_MODULE
                and (value is None or any(t.grad_fn is not None for t in tensors_in(value)))
            ]
        if isinstance(returned, Tensor) and not self.places:
            return (returned,)
        values = [value for kept, name in self.places if (value := kept.get(name)) is not None]
        return tensors_in([returned, *values])


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
