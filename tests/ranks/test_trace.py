"""Tracing on real ranks: what is seen of every step, that it changes nothing and leaves nothing."""

import gc
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from models import MODELS, Fragile, batch, line, loss_of
from recorder import record
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_teach import DistributedDataParallel, launch
from ddp_teach.collectives import count_collectives
from ddp_teach.steps import LADDER, AverageAfterBackward, Buckets, OverlappedHooks
from ddp_teach.trace import Recorder, plot, trace
from ddp_teach.watched_collectives import REPLACED

SMALL = {"bucket_cap_mb": 100 / 2**20}  # of 100 bytes: three buckets for the mlp
TORCHS = nn.parallel.DistributedDataParallel


def small_buckets(model):
    return Buckets(model, **SMALL)


def ours(model):
    return DistributedDataParallel(model, **SMALL)


def ours_as_views(model):
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **SMALL)


def torchs(model):
    return TORCHS(model, **SMALL)


def with_hook(wrap, hook, model):
    wrapper = wrap(model)
    wrapper.register_comm_hook(None, hook)
    return wrapper


def torchs_with_hook(model):
    return with_hook(torchs, default_hooks.allreduce_hook, model)


def ours_with_fp16(model):
    return with_hook(ours, default_hooks.fp16_compress_hook, model)


WRAPS = (
    *(*LADDER, small_buckets, ours, ours_as_views, torchs, torchs_with_hook, ours_with_fp16),
)  # fmt: skip
OVERLAPPING = ("OverlappedHooks", "small_buckets", "ours", "ours_as_views")


def step(wrapper, iteration=0):
    loss_of(wrapper(batch(dist.get_rank(), iteration))).backward()
    if type(wrapper) is AverageAfterBackward:
        wrapper.sync_gradients()


def trace_all():
    """By wrapper: the timeline of the third step; what the tests' own recorder and what
    count_collectives saw in the steps after it."""
    seen = {}
    for wrap in WRAPS:
        torch.manual_seed(0)
        wrapper = wrap(MODELS["mlp"]())
        step(wrapper)
        step(wrapper)
        wrapper.zero_grad()
        with trace(wrapper) as timeline:
            step(wrapper)
        wrapper.zero_grad()
        with record(wrapper.module) as events:
            step(wrapper)
        wrapper.zero_grad()
        with count_collectives() as counted:
            step(wrapper)
        seen[wrap.__name__] = timeline, events, counted.started
    return seen


@pytest.fixture(scope="module")
def seen():
    return launch(trace_all)


def each(seen, *names):
    """Every rank's timeline for these wrappers, or for all."""
    return [ranks[name][0] for ranks in seen for name in names or ranks]


NAMES = ("4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight")
BUCKETS = [NAMES[:2], NAMES[2:4], NAMES[4:]]


def gradients_of(timeline):
    return [event.name for event in timeline.events if event.kind == "gradient"]


def test_every_step_begins_with_forward_and_brings_every_gradient_within_backward(seen):
    for timeline in each(seen):
        assert timeline.kinds("forward", "forward end", "backward", "gradient", "backward end") == [
            "forward", "forward end", "backward", *["gradient"] * 6, "backward end"
        ]  # fmt: skip
        assert gradients_of(timeline) == list(NAMES)
        times = [event.time for event in timeline.events]
        assert times == sorted(times) and times[0] >= 0


def test_it_counts_what_the_tests_recorder_counts(seen):
    for ranks in seen:
        for name, (timeline, events, _) in ranks.items():
            if name == "torchs":
                continue  # which the recorder can't see
            for kind in ("all_reduce", "broadcast"):
                ours = [(c.nbytes, c.dtype) for c in timeline.collectives if c.kind == kind]
                theirs = [(e.nbytes, e.dtype) for e in events if e.kind == kind]
                assert ours == theirs, name
            waits = [e.kind for e in events].count("wait")
            asynchronous = [k for k, c in enumerate(timeline.collectives) if c.is_async]
            waited = [e.collective for e in timeline.events if e.kind == "wait"]
            assert sum(k in asynchronous for k in waited) == waits, name


def test_it_counts_what_passes_torchs_dispatcher(seen):
    for ranks in seen:
        counts = []
        for name, (timeline, _, counted) in ranks.items():
            assert [(c.kind, c.nbytes) for c in timeline.collectives] == counted, name
            counts.append(len(counted))
        assert counts == [0, 0, 6, 6, 1, *[3] * 6]


def test_average_launches_after_backward_one_parameter_after_the_other(seen):
    for timeline in each(seen, "AverageAfterBackward"):
        kinds = timeline.kinds()
        assert kinds[kinds.index("backward end") + 1 :] == ["launch", "wait", "done"] * 6
        assert [c.names for c in timeline.collectives] == [(name,) for name in NAMES[::-1]]


def test_overlapping_wrappers_launch_before_backward_ends_and_then_wait(seen):
    for timeline in each(seen, *OVERLAPPING):
        kinds = timeline.kinds()
        launches = [i for i, kind in enumerate(kinds) if kind == "launch"]
        gradients = [i for i, kind in enumerate(kinds) if kind == "gradient"]
        assert launches[0] < gradients[-1] < launches[-1] < kinds.index("wait")
        assert kinds[kinds.index("wait") :] == [*["wait", "done"] * len(launches), "backward end"]
        waited = [e.collective for e in timeline.events if e.kind == "wait"]
        assert waited == list(range(len(launches)))


def test_a_launch_follows_the_last_gradient_that_it_carries(seen):
    for timeline in each(seen, *OVERLAPPING, "torchs_with_hook", "ours_with_fp16"):
        launches = [i for i, event in enumerate(timeline.events) if event.kind == "launch"]
        for i, collective in zip(launches, timeline.collectives, strict=True):
            ready = [e.name for e in timeline.events[:i] if e.kind == "gradient"]
            assert set(ready[-len(collective.names) :]) == set(collective.names)


def test_what_a_collective_carries_is_told(seen):
    for timeline in each(seen, "OverlappedHooks"):
        assert [(c.bucket, c.names) for c in timeline.collectives] == [(None, (n,)) for n in NAMES]
    for timeline in each(seen, "small_buckets", "ours", "ours_as_views", "ours_with_fp16"):
        assert [(c.bucket, c.names) for c in timeline.collectives] == [*enumerate(BUCKETS)]
    for timeline in each(seen, "torchs", "torchs_with_hook"):
        carrying = [c for c in timeline.collectives if c.names]
        assert [(c.kind, c.bucket, c.names) for c in carrying] == [
            ("all_reduce", None, names) for names in BUCKETS
        ]
        assert [c.nbytes for c in carrying] == [108, 288, 160]


def test_a_collective_is_done_after_its_launch_and_before_its_wait_returns(seen):
    for name, timeline in [(name, ranks[name][0]) for ranks in seen for name in ranks]:
        ended = {e.collective: e.time for e in timeline.events if e.kind == "done"}
        for k, collective in enumerate(timeline.collectives):
            assert collective.done is None or collective.launched <= collective.done
            assert collective.done is not None or "torch" in name
            assert k not in ended or collective.done <= ended[k]


def test_of_torchs_class_the_launches_are_seen_and_the_waits_are_not(seen):
    for ours, torchs in zip(each(seen, "ours"), each(seen, "torchs"), strict=True):
        assert "wait" not in torchs.kinds()
        ours_in_backward = ours.kinds("gradient", "launch")
        assert torchs.kinds("gradient", "launch")[-len(ours_in_backward) :] == ours_in_backward


def test_the_picture_is_the_same_in_two_launches(seen):
    again = launch(trace_all)
    for name in seen[0]:
        first, second = plot(each(seen, name)), plot(each(again, name))
        assert first.svg == second.svg and repr(first) == repr(second), name


def test_a_timeline_is_small(seen):
    assert all(len(pickle.dumps(timeline)) < 5000 for timeline in each(seen))


# Steps that are more than forward and backward.


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = line()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.layer(x)


def accumulate():
    """Two micro-batches, the first in no_sync, then the optimizer's step."""
    wrapper = DistributedDataParallel(WithBuffer())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    wrapper(torch.ones(1, 1)).sum().backward()
    optimizer.zero_grad()
    with trace(wrapper) as timeline:
        with wrapper.no_sync():
            wrapper(torch.ones(1, 1)).sum().backward()
        wrapper(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    return timeline


def test_no_sync_buffers_and_the_optimizers_step_are_seen():
    for timeline in launch(accumulate):
        kinds = timeline.kinds()
        second = len(kinds) - kinds[::-1].index("forward") - 1
        assert "gradient" in kinds[:second] and kinds[-2:] == ["step", "step end"]
        carrying = [c for c in timeline.collectives if c.names]
        assert [(c.kind, c.names, c.bucket) for c in carrying] == [
            ("all_reduce", ("layer.weight",), 0)
        ]
        assert "broadcast" in [c.kind for c in timeline.collectives], "of the buffer"
        launch_place = [e.collective for e in timeline.events if e.kind == "launch"]
        assert launch_place == list(range(len(timeline.collectives)))


def break_off(wrap):
    """The kinds of events of a backward that breaks off after c, and what is left in place."""
    wrapper = wrap(Fragile())
    x = torch.ones(1, 1)
    before = in_place(wrapper)
    with pytest.raises(ValueError, match="boom"), trace(wrapper) as timeline:
        wrapper(x, breaks=True).sum().backward()
    same = in_place(wrapper) == before
    kinds_before_next = timeline.kinds()
    wrapper.zero_grad()
    wrapper(x).sum().backward()
    grads = [p.grad.item() for p in wrapper.parameters()]
    return kinds_before_next, timeline.kinds(), same, grads


def in_place(wrapper):
    """Everything that a trace replaces or adds to, as it is now."""
    functions = [getattr(dist, name) for name in REPLACED]
    optimizer = sys.modules["torch.optim.optimizer"]
    hooks = [
        len(registry or ())
        for module in (wrapper, *wrapper.modules())
        for registry in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    ]
    hooks += [len(p._backward_hooks or ()) for p in wrapper.parameters()]
    hooks += [len(p._post_accumulate_grad_hooks or ()) for p in wrapper.parameters()]
    hooks += [len(optimizer._global_optimizer_pre_hooks)]
    hooks += [len(optimizer._global_optimizer_post_hooks)]
    return [*map(id, functions), id(torch.autograd.backward), *hooks]


@pytest.mark.parametrize("wrap", [OverlappedHooks, ours])
def test_an_exception_is_noted_passed_on_and_leaves_nothing_behind(wrap):
    for within, later, same, grads in launch(break_off, wrap):
        assert within[:4] == ["forward", "forward end", "backward", "gradient"]
        assert within[-1] == "backward end" and "wait" not in within
        assert later == within, "what happened after the trace was noted, too"
        assert same and grads == [1.0] * 3


def traced_numbers(wrap, traced):
    torch.manual_seed(dist.get_rank())
    wrapper = wrap(MODELS["dtypes"]())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for iteration in range(3):
        optimizer.zero_grad()
        if traced:
            with trace(wrapper):
                step(wrapper, iteration)
        else:
            step(wrapper, iteration)
        optimizer.step()
    return {name: value.clone() for name, value in wrapper.module.state_dict().items()}


@pytest.mark.parametrize("wrap", [AverageAfterBackward, OverlappedHooks, Buckets, ours, torchs])
def test_tracing_changes_no_number(wrap):
    plain, traced = launch(traced_numbers, wrap, False), launch(traced_numbers, wrap, True)
    for one, other in zip(plain, traced, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def join_uneven(wrap, traced):
    """The gradients of rank + 1 backward passes in join, and the timeline."""
    rank = dist.get_rank()
    wrapper, seen = wrap(line()), []
    with (
        trace(wrapper) if traced else nullcontext() as timeline,
        wrapper.join(divide_by_initial_world_size=False),
    ):
        for _ in range(rank + 1):
            wrapper.zero_grad()
            wrapper(torch.tensor([[rank + 1.0]])).sum().backward()
            seen.append(wrapper.module.weight.grad.item())
    return seen, timeline


@pytest.mark.parametrize("wrap", [DistributedDataParallel, TORCHS])
def test_in_join_collectives_work_as_ever_and_unknown_zeros_are_no_mismatch(wrap):
    """In join torch's class hands to C++ code what an all-reduce has returned."""
    plain, traced = launch(join_uneven, wrap, False), launch(join_uneven, wrap, True)
    assert [seen for seen, _ in traced] == [seen for seen, _ in plain] == [[1.5], [1.5, 2.0]]
    assert "different things" not in repr(plot([timeline for _, timeline in traced]))


def in_a_group():
    """Ranks 1 and 2 train together, in a group of their own; rank 0 sends something before."""
    rank = dist.get_rank()
    group = [dist.new_group(ranks) for ranks in ([0], [1, 2])][min(rank, 1)]
    wrapper = DistributedDataParallel(line(), process_group=group)
    with trace(wrapper) as timeline:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert isinstance(work, dist.Work) and work.wait() and work.is_completed()
        wrapper(torch.ones(1, 1)).sum().backward()
    return timeline


def test_the_ranks_of_a_collective_are_those_of_its_group():
    for rank, timeline in enumerate(launch(in_a_group, nprocs=3)):
        first, second, *_ = timeline.collectives
        assert (first.ranks, first.names) == ((0, 1, 2), ())
        assert (second.ranks, second.names) == ([(0,), (1, 2), (1, 2)][rank], ("weight",))


# In one process.


def test_everything_is_as_it_was_when_the_block_is_left():
    model = nn.Sequential(line(), line())
    before = in_place(model)
    with trace(model):
        assert in_place(model) != before
    assert in_place(model) == before


def test_no_hook_is_left_on_the_nodes_that_accumulate_gradients():
    model = line()
    node = torch.autograd.graph.get_gradient_edge(model.weight).node  # so that it lives on
    with trace(model):
        pass
    model(torch.ones(1, 1)).sum().backward()
    assert node is not None and recorders() == []  # hooks would hold the recorder


def recorders():
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is Recorder]


def test_a_bare_model_has_no_collectives_and_forward_by_name_is_seen():
    wrapper = DistributedDataParallel(line())  # a world of one
    with trace(wrapper) as timeline:
        wrapper.forward(torch.ones(1, 1)).sum().backward()
    assert timeline.kinds() == ["forward", "forward end", "backward", "gradient", "backward end"]
    assert timeline.events[3].name == "weight" and timeline.rank == 0


def test_a_backward_in_a_backward_is_one():
    layer = line()

    def twice(x):
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)

    with trace(layer) as timeline:
        twice(torch.ones(1, 1, requires_grad=True)).sum().backward()
    assert timeline.kinds("backward", "backward end") == ["backward", "backward end"]


def test_gradients_that_are_asked_for_by_name_are_not_stored_and_not_noted():
    layer = line()
    with trace(layer) as timeline:
        torch.autograd.grad(layer(torch.ones(1, 1)).sum(), layer.weight)
    assert timeline.kinds() == ["forward", "forward end"]


def test_two_traces_at_once_are_refused_and_the_first_goes_on():
    model, before = line(), in_place(line())
    with trace(model) as timeline:
        with pytest.raises(RuntimeError, match="trace: another trace is running"), trace(model):
            pass
        model(torch.ones(1, 1))
    assert timeline.kinds() == ["forward", "forward end"] and in_place(model) == before
    with trace(model) as timeline:  # and afterwards a trace is possible again
        model(torch.ones(1, 1))
    assert timeline.kinds() == ["forward", "forward end"]


@pytest.mark.parametrize("model", [None, 3, nn.Linear, [line()]])
def test_what_is_no_module_is_refused(model):
    with (
        pytest.raises(TypeError, match="trace: model must be a torch.nn.Module, got "),
        trace(model),
    ):
        pass


def test_nothing_of_it_is_loaded_unless_it_is_asked_for():
    """So nothing of it can run in a program that does not trace."""
    code = "import sys, ddp_teach, ddp_teach.steps; print([m for m in sys.modules if 'trace' in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "ddp_teach" not in done.stdout
