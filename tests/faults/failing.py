"""Functions that go wrong on a rank, for the tests of launch; few imports: every rank does them."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn


def end_by(how):
    """Make this rank go wrong."""
    if how == "raise":
        raise ValueError("on purpose")
    if how == "exit":
        os._exit(9)
    if how == "sys.exit":
        sys.exit(3)
    if how == "segfault":
        ctypes.string_at(0)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(100)


class GoesWrong(torch.autograd.Function):
    """The identity; its backward goes wrong on rank 1."""

    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if dist.get_rank() == 1:
            end_by(ctx.how)
        return gradient, None


class Reduces(torch.autograd.Function):
    """The identity; its backward averages, and so waits for the other ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient)
        return gradient


class Mute(Exception):
    """An exception that can't be printed."""

    def __str__(self):
        raise ValueError("no words")


def raises_mute():
    raise Mute


def refuse_to_load():
    raise ValueError("on purpose")


class OneWay:
    """Can be pickled, and not unpickled."""

    def __reduce__(self):
        return refuse_to_load, ()


def returns_one_way():
    return OneWay() if dist.get_rank() == 1 else 0


def before_the_first_collective(how):
    if dist.get_rank() == 1:
        end_by(how)
    dist.all_reduce(torch.ones(2))


def in_forward(how):
    dist.all_reduce(torch.ones(2))
    x = nn.Linear(2, 2)(torch.ones(1, 2))
    if dist.get_rank() == 1:
        end_by(how)
    x.sum().backward()
    dist.all_reduce(torch.ones(2))


def in_backward(how):
    dist.all_reduce(torch.ones(2))
    x = nn.Linear(2, 2)(torch.ones(1, 2))
    GoesWrong.apply(Reduces.apply(x), how).sum().backward()
    Reduces.apply(x).sum().backward()


def in_a_collective(how):
    """Rank 1 goes wrong while rank 0 and itself are in the middle of an all-reduce."""
    dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 1:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        dist.all_reduce(torch.ones(2), group=None, async_op=True)
        end_by(how)
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.ones(2))


PLACES = [before_the_first_collective, in_forward, in_backward, in_a_collective]


def deaf(how):
    """Rank 0 does not care for SIGTERM."""
    if dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    if dist.get_rank() == 1:
        end_by(how)
    while True:
        time.sleep(0.1)


def all_raise():
    time.sleep(0.2 * (2 - dist.get_rank()))  # the last rank first
    raise ValueError(f"from rank {dist.get_rank()}")


def hides_the_lost_connection():
    if dist.get_rank() == 1:
        os._exit(9)
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError:
        raise ValueError("told in other words") from None


def one_too_many():
    dist.all_reduce(torch.ones(2))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))


def skips_backward():
    y = Reduces.apply(torch.ones(2, requires_grad=True))
    if dist.get_rank() == 0:
        y.sum().backward()


def busy():
    while True:
        pass


def stopped():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


class Waiting:
    """Says what it waits for, as a reducer would."""

    def __init__(self, text):
        self.text = text

    def waits_for(self):
        return self.text or 1 / 0

    def wait(self):
        dist.barrier()


def says_what_it_waits_for(text):
    if dist.get_rank() == 0:
        Waiting(text).wait()


class SlowToArrive:
    """An argument that takes its time on the ranks."""

    def __getstate__(self):
        return {"seconds": 100}

    def __setstate__(self, state):
        time.sleep(state["seconds"])


class NotOnARank:
    """A result that can't be sent."""

    def __init__(self):
        self.lock = threading.Lock()


def not_sendable():
    return NotOnARank()


def take(_):
    pass


class OnlyHere:
    """An argument that can be packed but not unpacked."""

    def __reduce__(self):
        return int, ("not a number",)


def leaves_things_behind():
    threading.Thread(target=time.sleep, args=(100,)).start()
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(1,), daemon=True).start()
    dist.all_reduce(torch.ones(2), async_op=True)
    return dist.get_rank()


def destroys_its_group():
    dist.destroy_process_group()
    return "fine"


def note_pid(folder):
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))


def long(folder, how=None):
    """Leave word that this rank runs; never return. Rank 1 may stop itself."""
    note_pid(folder)
    dist.barrier()
    if how and dist.get_rank() == 1:
        end_by(how)
    dist.barrier() if dist.get_rank() == 0 else time.sleep(100)


def ok():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()
