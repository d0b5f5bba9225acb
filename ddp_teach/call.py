"""A call that can travel to other processes: its arguments checked, everything in it by value."""

import inspect
import io
import math
import numbers
import pickle
import sys
from collections.abc import Callable
from functools import _lru_cache_wrapper as CachedFunction
from functools import lru_cache
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import cloudpickle
import torch

MOST_RANKS = 256  # more processes than any one machine is good for: most likely a slip


class CallPickler(cloudpickle.Pickler):
    """Functions and classes of a notebook or script by value.

    cloudpickle leaves out two things that are needed here: which file a line of code came from, for
    tracebacks, and that what was a global of ``__main__`` is one again, so that the other process
    can pickle it.
    """

    def reducer_override(self, value: Any) -> Any:
        if type(value) is CodeType:
            make, parts = self.dispatch_table[CodeType](value)[:2]
            return code_from, (value.co_filename, make, parts)
        if type(value) is CachedFunction and value.__module__ == "__main__":
            return cached_function, (value.cache_parameters(), value.__wrapped__)
        reduced = super().reducer_override(value)
        if reduced is NotImplemented or not is_global_of_main(value):
            return reduced
        make, parts, *rest = reduced
        return global_of_main, (value.__name__, make, parts), *rest


class ResultPickler(CallPickler):
    """What came with the call goes back by its name: its owner's own stays as it is."""

    def reducer_override(self, value: Any) -> Any:
        return NotImplemented if is_global_of_main(value) else super().reducer_override(value)


def is_global_of_main(value: Any) -> bool:
    """Whether ``value`` is a function or class that ``__main__`` knows by the value's own name."""
    if not isinstance(value, (FunctionType, type)) or value.__module__ != "__main__":
        return False
    return vars(sys.modules["__main__"]).get(value.__name__) is value


def global_of_main(name: str, make: Callable, parts: tuple) -> Any:
    """The function or class that ``make(*parts)`` returns, made known to ``__main__``."""
    value = make(*parts)
    setattr(sys.modules["__main__"], name, value)
    return value


def cached_function(how: dict[str, Any], fn: Callable) -> Callable:
    """What ``@functools.lru_cache(**how)`` makes of ``fn``, with nothing in its cache."""
    return lru_cache(**how)(fn)


def code_from(filename: str, make: Callable[..., CodeType], parts: tuple) -> CodeType:
    """The code object that ``make(*parts)`` returns, as a piece of the file ``filename``."""
    return make(*parts).replace(co_filename=filename)


def dumps(value: Any, pickler: type[pickle.Pickler] = CallPickler) -> bytes:
    """``value`` as bytes, tensors and all."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=SimpleNamespace(Pickler=pickler, __name__=__name__))
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """A copy of the value that ``dumps`` was given; every tensor in it is on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def pack(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> bytes:
    """The call as bytes; raise TypeError naming the part that can't leave this process."""
    try:
        return dumps((fn, args, kwargs))
    except Exception as error:
        parts = {"fn": fn}
        parts |= {f"args[{i}]": value for i, value in enumerate(args)}
        parts |= {f"kwargs[{name!r}]": value for name, value in kwargs.items()}
        for name, value in parts.items():
            reason = why_not_sent(value)
            if reason:
                raise TypeError(
                    f"launch: {name} must be something that can be pickled, to be sent to other "
                    f"processes, got {short(value)}: {reason}"
                ) from None
        raise TypeError(f"launch: the call can't be pickled: {one_line(error)}") from None


def why_not_sent(value: Any) -> str:
    """Why ``value`` can't be sent to another process; empty if it can."""
    try:
        dumps(value)
    except Exception as error:
        return one_line(error)
    return ""


def pack_result(result: Any, pickler: type[pickle.Pickler] = ResultPickler) -> bytes:
    """What a rank's function returned, as bytes; raise TypeError if it can't leave the rank."""
    try:
        return dumps(result, pickler)
    except Exception as error:
        raise TypeError(
            f"the result must be something that can be pickled, to be sent back, got "
            f"{short(result)}: {one_line(error)}"
        ) from None


def check_arguments(
    fn: Callable, args: tuple, kwargs: dict[str, Any], nprocs: int, timeout: float, live: bool
) -> None:
    """Raise TypeError or ValueError, in one line, for what ``launch`` can't work with."""
    if not callable(fn):
        raise TypeError(f"launch: fn must be a function (not its result), got {short(fn)}")
    accepted = f"a whole number from 1 to {MOST_RANKS}"
    if not isinstance(nprocs, int) or isinstance(nprocs, bool):
        raise TypeError(f"launch: nprocs must be {accepted}, got {short(nprocs)}")
    if not 1 <= nprocs <= MOST_RANKS:
        raise ValueError(f"launch: nprocs must be {accepted}, got {nprocs}")
    accepted = "a number of seconds above 0"
    if not isinstance(timeout, numbers.Real) or isinstance(timeout, bool):
        raise TypeError(f"launch: timeout must be {accepted}, got {short(timeout)}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"launch: timeout must be {accepted}, got {timeout}")
    if not isinstance(live, bool):
        raise TypeError(f"launch: live must be True or False, got {short(live)}")
    check_fits(fn, args, kwargs)


def check_fits(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise TypeError if ``fn`` doesn't take these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"launch: the arguments must fit {name}{signature}, but: {one_line(error)}"
        ) from None


def short(value: Any) -> str:
    """The value and its type, in at most one line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a class of the caller's own may fail at it
        text = object.__repr__(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if value is None else f"{text} ({type(value).__name__})"


def one_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    try:
        return " ".join(str(error).split())
    except Exception:
        return "an exception that can't be printed"
