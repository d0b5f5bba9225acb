"""Which parameters the wrapper looks after, and whether the model still has the same ones.

A parameter that is unfrozen, replaced or added after wrapping has no hook, so its gradient would
stay local without a word. ``ModelWatch`` notices, at a cost small enough to look after every
backward.
"""

from collections.abc import Collection, Iterator
from itertools import chain

from torch import nn


def managed_parameters(
    module: nn.Module, ignored: Collection[str]
) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Name, parameter, and whether its gradient is sparse, for all that require grad; a tied
    parameter comes once."""
    seen = set()
    for prefix, owner in module.named_modules():
        sparse = isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse
        for name, param in owner.named_parameters(prefix, recurse=False):
            # torch's own list of names to ignore has ".weight" for a parameter of the root
            if name in ignored or f".{name}" in ignored or param in seen:
                continue
            if param.requires_grad:
                seen.add(param)
                yield name, param, sparse


class ModelWatch:
    """Called with no arguments: a message if ``module`` has a parameter that requires grad and is
    not looked after, ``None`` otherwise."""

    def __init__(self, module: nn.Module, ignored: Collection[str]):
        self.module, self.ignored = module, ignored
        self._look()

    def _look(self) -> None:
        self.managed = [p for _, p, _ in managed_parameters(self.module, self.ignored)]
        self.dtypes = [p.dtype for p in self.managed]
        known = set(self.managed)
        self.frozen = [p for p in self.module.parameters() if p not in known]
        self.frozen = [p for p in self.frozen if not p.requires_grad]
        self.modules = list(self.module.modules())
        # named_parameters() would say the same, but takes 20 times as long
        self.registries = [r for m in self.modules for r in (m._parameters, m._modules)]
        self.ids = self._registered()

    def _registered(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(dict.values, self.registries)))]

    def __call__(self) -> str | None:
        if [p.dtype for p in self.managed] != self.dtypes:
            return self._message("changed its dtype", self._other_dtype())
        if self._registered() == self.ids and not any(p.requires_grad for p in self.frozen):
            return None
        known = set(self.managed)
        for name, param, _ in managed_parameters(self.module, self.ignored):
            if param not in known:
                how = "was unfrozen" if param in set(self.frozen) else "was added or replaced"
                return self._message(how, name)
        still_managed = self.managed, self.dtypes
        self._look()
        self.managed, self.dtypes = still_managed
        return None

    def _other_dtype(self) -> str:
        names = [name for name, _, _ in managed_parameters(self.module, self.ignored)]
        return next(
            n for n, p, d in zip(names, self.managed, self.dtypes, strict=True) if p.dtype != d
        )

    @staticmethod
    def _message(how: str, name: str) -> str:
        return (
            f"Parameter {name} {how} after the model was wrapped, so its gradient is not averaged "
            "over the ranks. Wrap the model in DistributedDataParallel again after such a change."
        )
