"""Small programs with an answer that can be worked out in the head, run with any DDP class.

    @case(3.0)
    def two_micro_batches(wrap, rank):
        model = wrap(line())
        ...
        return grad(model.module.weight)

``wrap(module, **options)`` builds the wrapper under test. A program returns plain values, on every
rank, and ``case`` says which are right, for our class and for torch's. One weight of value 1 and
the input rank + 1: on two ranks the local gradients are 1 and 2, and their mean is 1.5.
"""

import importlib
import pkgutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from models import line
from torch import Tensor, nn

VARIANTS = {
    "plain": {},
    "view": {"gradient_as_bucket_view": True},
    "small": {"bucket_cap_mb": 1e-6},  # one parameter a bucket
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
EVERY = tuple(VARIANTS)
SAME = object()  # torch's class gives what ours gives
RACES = object()  # torch's class sometimes fails and sometimes does not: not asserted
HANGS = object()  # torch's class does not come to an end on every rank


@dataclass(frozen=True)
class ByRank:
    """What each rank holds, where that differs: ``values[r]`` for rank r."""

    values: tuple


def by_rank(*values: Any) -> ByRank:
    return ByRank(values)


@dataclass(frozen=True)
class Raised:
    """An exception that a program met."""

    kind: str
    message: str


@dataclass(frozen=True, eq=False)
class Error:
    """Equals every exception of type ``kind`` whose message has all ``words``."""

    kind: str
    words: tuple

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Raised):
            return False
        return other.kind == self.kind and all(word in other.message for word in self.words)


def error(kind: type[Exception], *words: str) -> Error:
    return Error(kind.__name__, words)


@dataclass(frozen=True)
class Case:
    """``alone``: whether a class that gets it wrong leaves ranks out of step, so that nothing may
    run after it."""

    program: Callable[[Callable, int], Any]
    options: dict
    ours: Any
    torch: Any
    nprocs: int
    alone: bool


CASES: dict[str, Case] = {}


def case(
    ours: Any, torch: Any = SAME, *, variants: tuple = ("plain",), nprocs: int = 2, alone=False
) -> Callable:
    """Adds the program to ``CASES``, once for each of ``variants`` (keys of ``VARIANTS``).

    ``torch`` is what torch's class gives, where that differs; a dict says it by variant.
    """

    def add(program: Callable) -> Callable:
        section = program.__module__.rpartition(".")[2]
        for variant in variants:
            name = f"{section}.{program.__name__}" + (f"[{variant}]" if len(variants) > 1 else "")
            theirs = torch.get(variant, SAME) if type(torch) is dict else torch
            theirs = ours if theirs is SAME else theirs
            CASES[name] = Case(program, VARIANTS[variant], ours, theirs, nprocs, alone)
        return program

    return add


def run(names: list[str], wrapper: type[nn.Module]) -> dict[str, Any]:
    """In a rank: run the cases one after the other; what each returned or raised."""
    import_all()
    rank, results = dist.get_rank(), {}
    warnings.simplefilter("ignore")
    for name in names:
        torch.manual_seed(rank)
        program, options = CASES[name].program, CASES[name].options
        results[name] = attempt(program, partial(build, wrapper, options), rank)
        if not CASES[name].alone:  # a barrier could pass for what a rank that hangs is waiting for
            dist.barrier()
    return results


def import_all() -> None:
    """Fill ``CASES`` from the modules beside this one, in alphabetical order."""
    for _, name, _ in pkgutil.iter_modules(__path__, "cases."):
        importlib.import_module(name)


def build(wrapper: type[nn.Module], options: dict, module: nn.Module, **more: Any) -> nn.Module:
    return wrapper(module, **{**options, **more})


def attempt(function: Callable, *args: Any) -> Any:
    """What ``function`` returns, or what it raised."""
    try:
        return function(*args)
    except Exception as raised:
        return Raised(type(raised).__name__, str(raised))


def grad(param: Tensor) -> Any:
    """The gradient as a number or list; ``None`` where there is none."""
    return None if param.grad is None else numbers(param.grad)


def grads(model: nn.Module) -> list:
    return [grad(param) for param in model.parameters()]


def numbers(tensor: Tensor) -> Any:
    tensor = tensor.detach().to_dense()
    return tensor.item() if tensor.numel() == 1 else tensor.tolist()


def x(rank: int, factor: float = 1.0) -> Tensor:
    return torch.tensor([[float((rank + 1) * factor)]])


def backward(model: nn.Module, rank: int, factor: float = 1.0) -> None:
    """One forward and backward pass."""
    model(x(rank, factor)).sum().backward()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0)


class Two(nn.Module):
    """Layers a and b, each one weight of value 1, used as ``way(self, x)`` says."""

    def __init__(self, way: Callable[["Two", Tensor], Tensor]):
        super().__init__()
        self.a, self.b, self.way = line(), line(), way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def chained(two: Two, x: Tensor) -> Tensor:
    return two.b(two.a(x))


def only_a(two: Two, x: Tensor) -> Tensor:
    return two.a(x)


def only_b(two: Two, x: Tensor) -> Tensor:
    return two.b(x)


class Wrapped(nn.Module):
    """``function(layer, x)`` as a module with one layer, a weight of value 1."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]):
        super().__init__()
        self.layer, self.function = line(), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer, x)
