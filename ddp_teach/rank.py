"""What runs inside a rank: join the process group, call the function, hand over what came of it.

A rank and the process that launched it share a private folder (the call, and per rank its printed
text and its result or failure) and a connection. Over the connection the rank says how far it is,
answers the question where it stands, and notices when the launching process is gone.
"""

import contextlib
import datetime
import faulthandler
import io
import os
import pickle
import shutil
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

RUNNING, RETURNED, WHERE, DONE = b"running", b"returned", b"where", b"done"


def dumps(value: Any) -> bytes:
    """``value`` as bytes: functions and classes of a notebook or script, and tensors, by value."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=cloudpickle)
    return buffer.getvalue()


def loads(data: bytes) -> Any:
    """The value that ``dumps`` was given; every tensor arrives on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def main(
    rank: int, world_size: int, folder: Path, parent: Connection, environ: dict, timeout: float
) -> None:
    """Run the call in ``folder`` as ``rank``; return once all ranks are done, or exit with 1."""
    set_environment(environ, rank, world_size)
    redirect_output(folder / f"{rank}.out")
    crash = open(folder / f"{rank}.crash", "w")  # noqa: SIM115 (open as long as this process lives)
    faulthandler.enable(crash)
    standing = threading.Thread(
        target=answer, args=(parent, threading.get_ident(), folder), daemon=True
    )
    standing.start()
    try:
        join_process_group(
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=min(timeout + 60, 1e8)),
        )
        fn, args, kwargs = loads((folder / "call").read_bytes())
        share_main_with(fn)
        parent.send_bytes(RUNNING)
        write(folder / f"{rank}.result", dumps_result(fn(*args, **kwargs)))
    except BaseException as error:
        write(folder / f"{rank}.failure", pickle.dumps(describe(error)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    parent.send_bytes(RETURNED)
    standing.join()  # others may still need this rank's connections
    if dist.is_initialized():
        dist.destroy_process_group()


def set_environment(environ: dict[str, str], rank: int, world_size: int) -> None:
    """The launching process's environment as it is now, and what torchrun would add to it."""
    os.environ.clear()
    os.environ.update(environ)
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # this rank was not started by torchrun
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    for _, name in socket.if_nameindex() if hasattr(socket, "if_nameindex") else ():
        if name in ("lo", "lo0"):  # Linux's and macOS's names: stay on this machine
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def redirect_output(path: Path) -> None:
    """Everything printed from here on, by Python or by C++, goes to the file ``path``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115 (open as long as this process lives)
            number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
    # A path in front of a warning differs from machine to machine.
    warnings.formatwarning = lambda message, category, *_: f"{category.__name__}: {message}\n"


def join_process_group(**rendezvous: Any) -> None:
    """Initialise the default process group: gloo for CPU tensors, nccl for those on a GPU."""
    torch.set_num_threads(1)
    local_rank, local_world_size = (
        int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    backend = "gloo"
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size:
        torch.cuda.set_device(local_rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, **rendezvous)


def share_main_with(fn: Any) -> None:
    """Let pickle find in ``__main__`` what a function from a notebook or script refers to."""
    vars(sys.modules["__main__"]).update(
        (name, value)
        for name, value in getattr(fn, "__globals__", {}).items()
        if getattr(value, "__module__", None) == "__main__"
    )


def dumps_result(result: Any) -> bytes:
    try:
        return dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result, a {type(result).__name__}, can't be sent back to the launching process: "
            f"{error}"
        ) from None


def write(path: Path, data: bytes) -> None:
    """Write the file in one step: whoever finds it finds all of it."""
    path.with_suffix(".part").write_bytes(data)
    path.with_suffix(".part").rename(path)


def describe(error: BaseException) -> dict[str, Any]:
    """What the launching process needs to know of an exception, in plain types."""
    frames = traceback.walk_tb(error.__traceback__)
    return {
        "time": time.monotonic(),
        "what": "".join(traceback.format_exception_only(error)).strip(),
        "frames": [
            (frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames
        ],
        "traceback": "".join(traceback.format_exception(error)),
        "lost_connection": any(lost_connection(e) for e in chain(error)),
    }


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def lost_connection(error: BaseException) -> bool:
    """Whether the error says that another rank is gone: then that rank has more to tell."""
    kinds = (ConnectionError, dist.DistNetworkError, dist.DistBackendError)
    return isinstance(error, kinds) or "gloo/transport" in str(error)


def answer(parent: Connection, thread: int, folder: Path) -> None:
    """Say where the rank stands whenever the parent asks, until it says that all ranks are done."""
    try:
        while parent.recv_bytes() != DONE:
            parent.send(where(sys._current_frames()[thread]))
    except (EOFError, OSError):  # the launching process is gone, and nobody else would tidy up
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def where(frame: FrameType | None) -> dict[str, Any]:
    """The stack of a running function, outermost call first, and what it says to wait for.

    An object whose method is running may have a method ``waits_for()`` that returns a short text:
    "bucket 1 of 3 (fc.weight, fc.bias)". The innermost one answers.
    """
    frames: list[tuple[str, int, str]] = []
    waits_for = ""
    while frame is not None:
        frames.insert(0, (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        tell = getattr(frame.f_locals.get("self"), "waits_for", None)
        if not waits_for and callable(tell):
            with contextlib.suppress(Exception):  # asked in the middle of anything
                waits_for = str(tell())
        frame = frame.f_back
    return {"frames": frames, "waits_for": waits_for}
