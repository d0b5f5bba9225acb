"""Communication hooks: torch's own, and some that a user may write."""

import math

import torch
import torch.distributed as dist
from models import line
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer

from cases import (
    HANGS,
    RACES,
    SAME,
    Two,
    attempt,
    backward,
    by_rank,
    case,
    chained,
    error,
    grad,
    grads,
)

VARIANTS = ("plain", "view", "small", "unused", "static")


def hooked(wrap, rank, state, hook, steps=2):
    """The gradients after each step with ``hook``."""
    model, seen = wrap(Two(chained)), []
    model.register_comm_hook(state, hook)
    for _ in range(steps):
        model.zero_grad()
        backward(model, rank)
        seen.append(grads(model))
    return seen


@case([[1.5, 1.5]] * 2, variants=VARIANTS)
def all_reduce(wrap, rank):
    return hooked(wrap, rank, None, default_hooks.allreduce_hook)


@case([[1.5, 1.5]] * 2, variants=VARIANTS)
def fp16_compression(wrap, rank):
    return hooked(wrap, rank, None, default_hooks.fp16_compress_hook)


NEEDS_CUDA = error(TypeError, "BF16 all reduce communication hook required CUDA")


@case(
    [[1.5, 1.5]] * 2,
    torch=NEEDS_CUDA if torch.version.cuda is None else SAME,  # the build counts, not the machine
    variants=VARIANTS,
)
def bf16_compression(wrap, rank):
    return hooked(wrap, rank, None, default_hooks.bf16_compress_hook)


@case([[1.5, 1.5]] * 2)
def fp16_compression_around_all_reduce(wrap, rank):
    hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    return hooked(wrap, rank, None, hook)


def power_sgd_steps(wrap, steps):
    """Whether the gradients are equal on all ranks, and not zero."""
    model = wrap(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(grad, mine) for grad in everyone), bool(mine.any())


@case((True, True), variants=("plain", "view", "static"))
def power_sgd(wrap, rank):
    return power_sgd_steps(wrap, steps=6)


@case((True, True), torch=RACES, variants=("small", "unused"), alone=True)
def power_sgd_with_more_collectives_on_the_way(wrap, rank):
    """The hook starts its second all-reduce when the first has ended, in a thread of its own; no
    other may start meanwhile, or the ranks' orders differ."""
    return power_sgd_steps(wrap, steps=60)


@case([1.5, 1.5, by_rank(1.0, 2.0)], variants=("plain", "view"))
def post_local_sgd(wrap, rank):
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2
    )
    model, seen = wrap(line()), []
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    for _ in range(3):
        model.zero_grad()
        backward(model, rank)
        seen.append(grad(model.module.weight))
    return seen


@case([-0.5, by_rank(-1.5, -2.5), -3.5])
def post_local_sgd_with_its_optimizer(wrap, rank):
    state = post_localSGD_hook.PostLocalSGDState(
        process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=1
    )
    model, seen = wrap(line()), []
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), averager)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model, rank)
        optimizer.step()
        seen.append(model.module.weight.item())
    return seen


def noop(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@case([by_rank([1.0, 1.0], [2.0, 2.0])] * 2, variants=VARIANTS)
def noop_hook_leaves_gradients_local(wrap, rank):
    return hooked(wrap, rank, None, noop)


def doubled(state, bucket):
    """Sums, not averages, and writes down what it was given."""
    state.append(
        (bucket.index(), bucket.is_last(), len(bucket.gradients()), len(bucket.parameters()))
    )
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@case([[[3.0, 3.0]] * 2, [(0, True, 2, 2)] * 2])
def a_hook_of_the_user(wrap, rank):
    calls = []
    return [hooked(wrap, rank, calls, doubled), calls]


@case([[3.0, 3.0], [(0, False, 1, 1), (1, True, 1, 1)]])
def a_hook_and_many_buckets(wrap, rank):
    calls = []
    seen = hooked(lambda m: wrap(m, bucket_cap_mb=1e-6), rank, calls, doubled)
    return [seen[-1], calls[-2:]]


@case([6.0, 2])
def a_hook_and_no_sync(wrap, rank):
    model, calls = wrap(line()), []
    model.register_comm_hook(calls, doubled)
    for _ in range(2):
        model.zero_grad()
        with model.no_sync():
            backward(model, rank)
        backward(model, rank)
    return [grad(model.module.weight), len(calls)]


@case([[1.5, None]] * 2)
def a_hook_and_detection(wrap, rank):
    model, seen = wrap(Two(lambda two, x: two.a(x)), find_unused_parameters=True), []
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    for _ in range(2):
        model.zero_grad()
        backward(model, rank)
        seen.append(grads(model))
    return seen


@case([by_rank("1.0", "nan"), 1.5])
def a_hook_that_averages_nothing_and_a_gradient_that_is_not_a_number(wrap, rank):
    local = wrap(line())
    local.register_comm_hook(None, noop)
    backward(local, rank, math.nan if rank == 1 else 1.0)
    model = wrap(line())
    backward(model, rank)
    return [str(grad(local.module.weight)), grad(model.module.weight)]


@case(error(RuntimeError, "register_comm_hook"))
def registered_twice(wrap, rank):
    model = wrap(line())
    model.register_comm_hook(None, noop)
    model.register_comm_hook(None, noop)


@case([error(TypeError, "callable"), 1.5])
def not_a_hook(wrap, rank):
    model = wrap(line())
    outcome = attempt(model.register_comm_hook, None, "hook")
    backward(model, rank)
    return [outcome, grad(model.module.weight)]


@case([error(ValueError, "in the hook"), 1.5], torch=error(RuntimeError, "INTERNAL ASSERT"))
def a_hook_that_raises_once(wrap, rank):
    model, calls = wrap(line()), []

    def fails_at_first(state, bucket):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("in the hook")
        return default_hooks.allreduce_hook(None, bucket)

    model.register_comm_hook(None, fails_at_first)
    outcome = attempt(backward, model, rank)
    model.zero_grad()
    backward(model, rank)
    return [outcome, grad(model.module.weight)]


@case([by_rank(None, error(ValueError, "in the hook")), [1.5, 1.5]], torch=HANGS, alone=True)
def a_hook_that_raises_on_one_rank(wrap, rank):
    model, calls = wrap(Two(chained), bucket_cap_mb=1e-6), []

    def fails_at_first(state, bucket):
        calls.append(1)
        if rank == 1 and len(calls) == 1:
            raise ValueError("in the hook")
        return default_hooks.allreduce_hook(None, bucket)

    backward(model, rank)
    model.register_comm_hook(None, fails_at_first)
    outcome = attempt(backward, model, rank)
    model.zero_grad()
    backward(model, rank)
    return [outcome, grads(model)]


BAD_FUTURE = error(RuntimeError, "once")


@case(
    [by_rank([0.5, 1.5], BAD_FUTURE), [1.5, 1.5], [1.5, 1.5]],
    torch=[by_rank([1.5, 1.5], BAD_FUTURE), [1.5, 1.5], [1.5, 1.5]],
    alone=True,
)
def a_future_that_fails_on_one_rank(wrap, rank):
    """No hang; the other rank's mean lacks what the failing one has not sent."""
    model, seen, fails = wrap(Two(chained), bucket_cap_mb_list=[1e-6]), [], []

    def hook(_state, bucket):
        failing = rank == 1 and fails and bucket.index() == 0

        def done(future):
            if failing:
                raise ValueError("once")
            return future.value()[0] / 2

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(done)

    model.register_comm_hook(None, hook)
    for step in range(3):
        fails[:] = [True] if step == 0 else []
        model.zero_grad()
        failed = attempt(backward, model, rank)
        seen.append(failed or grads(model))
    return seen
