"""Arguments of launch: checked before any process is started."""

import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

from ddp_teach.rank import dumps


def check_arguments(
    fn: Callable, args: tuple, kwargs: dict, nprocs: int, timeout: float, live: bool
) -> None:
    """Raise TypeError or ValueError, in one line, for what ``launch`` can't work with."""
    if not callable(fn):
        raise TypeError(
            f"launch: fn must be a function, got {short(fn)}; pass the function itself, not its "
            "result"
        )
    if not isinstance(nprocs, int) or isinstance(nprocs, bool):
        raise TypeError(f"launch: nprocs must be a whole number from 1 up, got {short(nprocs)}")
    if nprocs < 1:
        raise ValueError(f"launch: nprocs must be a whole number from 1 up, got {nprocs}")
    if not isinstance(timeout, numbers.Real) or isinstance(timeout, bool):
        raise TypeError(
            f"launch: timeout must be a number of seconds above 0, got {short(timeout)}"
        )
    if not 0 < timeout < math.inf:
        raise ValueError(f"launch: timeout must be a number of seconds above 0, got {timeout}")
    if not isinstance(live, bool):
        raise TypeError(f"launch: live must be True or False, got {short(live)}")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(fn, "__name__", short(fn))
        raise TypeError(f"launch: {name}{signature} can't be called like this: {error}") from None


def pack_call(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    """The call as bytes; raise TypeError naming the part that can't be sent to another process."""
    try:
        return dumps((fn, args, kwargs))
    except Exception as error:
        parts = {"fn": fn}
        parts.update({f"args[{i}]": value for i, value in enumerate(args)})
        parts.update({f"kwargs[{name!r}]": value for name, value in kwargs.items()})
        for name, value in parts.items():
            try:
                dumps(value)
            except Exception as reason:
                raise TypeError(
                    f"launch: {name} must be something pickle can send to another process, got "
                    f"{short(value)}: {reason}"
                ) from None
        raise TypeError(f"launch: the call can't be sent to another process: {error}") from None


def short(value: Any) -> str:
    """The value and its type in at most one line."""
    text = " ".join(repr(value).split())
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if value is None else f"{text} ({type(value).__name__})"
