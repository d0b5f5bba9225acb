"""The finished wrapper from outside: what it sends and when, its arguments, what it looks like."""

import functools
import gc
import inspect
import os
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from models import Boom, WithBuffers, batch, chain, line, loss_of, mlp
from recorder import kinds, record
from torch import nn

import ddp_teach
from ddp_teach import DistributedDataParallel

launch = functools.partial(ddp_teach.launch, timeout=20)
TORCHS = nn.parallel.DistributedDataParallel
SMALLEST = {"bucket_cap_mb": 1e-6}  # one parameter a bucket
BYTES = 4 * (4 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3)  # of the gradients of mlp()


def step(model, iteration=0):
    model.zero_grad()
    loss_of(model(batch(dist.get_rank(), iteration))).backward()


# What is sent, and when.


def collectives(module, steps=3, **options):
    """For every step of training: the collectives as (kind, bytes), and all events by kind."""
    counted = []
    with record(module) as events:
        model = DistributedDataParallel(module, **options)
        events.clear()
        for _ in range(steps):
            step(model)
            sent = [(e.kind, e.nbytes) for e in events if e.kind in ("all_reduce", "broadcast")]
            counted.append((sent, kinds(events)))
            events.clear()
    return counted


def per_step(*args, **options):
    """The same on every rank: [collectives in the first step, in the second, ...]."""
    first, *others = launch(collectives, *args, **options)
    for other in others:
        assert [sent for sent, _ in other] == [sent for sent, _ in first]
    return first


def test_one_all_reduce_carries_all_gradients_of_a_small_model():
    first, second, third = (sent for sent, _ in per_step(mlp()))
    assert [c for c in first if c[0] == "all_reduce"] == [("all_reduce", BYTES)]
    assert second == third == [("all_reduce", BYTES)]


def test_only_the_first_backward_agrees_on_the_order_of_gradients():
    first, second, _ = (sent for sent, _ in per_step(mlp()))
    assert first[1:] == [("broadcast", 8 * 6)]  # six parameters, int64
    assert second == [("all_reduce", BYTES)]


def test_many_buckets_send_as_many_bytes_in_all():
    *_, (sent, _) = per_step(mlp(), **SMALLEST)
    sizes = [nbytes for _, nbytes in sent]
    assert sorted(sizes) == sorted(4 * p.numel() for p in mlp().parameters())
    assert sum(sizes) == BYTES


def test_all_reduces_start_before_backward_ends_and_waits_come_last():
    *_, (_, events) = per_step(mlp(), **SMALLEST)
    last_gradient = len(events) - 1 - events[::-1].index("gradient")
    assert events.index("all_reduce") < last_gradient
    assert events.count("gradient") == events.count("all_reduce") == 6
    assert events[-6:] == ["wait"] * 6
    assert events.index("wait") > last_gradient


def test_every_all_reduce_is_asynchronous():
    assert launch(asynchronous) == [True, True]


def asynchronous():
    model = DistributedDataParallel(mlp(), **SMALLEST)
    step(model)
    with record() as events:
        step(model)
    return {e.async_op for e in events if e.kind == "all_reduce"} == {True}


def test_detection_counts_uses_in_one_more_all_reduce():
    *_, (sent, _) = per_step(mlp(), find_unused_parameters=True)
    assert sent == [("all_reduce", BYTES), ("all_reduce", 4 * 6)]


def test_buffers_travel_in_one_broadcast_before_the_forward_pass():
    *_, (sent, events) = per_step(WithBuffers())
    nbytes = sum(b.numel() * b.element_size() for b in WithBuffers().buffers())
    assert sent == [("broadcast", nbytes), ("all_reduce", 4 * 15)]
    assert events.index("broadcast") < events.index("gradient")


def test_buffers_stay_where_they_are_if_asked():
    *_, (sent, _) = per_step(WithBuffers(), forward_sync_buffers=False)
    assert sent == [("all_reduce", 4 * 15)]


def accumulating():
    """What is sent in no_sync, in the step after it, and in an evaluation."""
    model, seen = DistributedDataParallel(mlp()), []
    step(model)
    step(model)
    with record() as events:
        with model.no_sync():
            for iteration in range(3):
                loss_of(model(batch(dist.get_rank(), iteration))).backward()
        seen.append(kinds(events))
        events.clear()
        loss_of(model(batch(dist.get_rank(), 3))).backward()
        seen.append(kinds(events))
        events.clear()
        with torch.no_grad():
            model(batch(dist.get_rank(), 4))
            model(batch(dist.get_rank(), 5))
        seen.append(kinds(events))
    return seen


def test_nothing_is_sent_in_no_sync():
    local, synchronised, evaluation = launch(accumulating)[0]
    assert local == []
    assert synchronised == ["all_reduce", "wait"]
    assert evaluation == []


def buffers_while_accumulating():
    model, seen = DistributedDataParallel(WithBuffers()), []
    step(model)
    for synchronise in (False, False, True, True):
        model.require_backward_grad_sync = synchronise
        with record() as events:
            loss_of(model(batch(dist.get_rank(), 0))).backward()
        seen.append(kinds(events, "broadcast", "all_reduce"))
    return seen


def test_buffers_are_sent_only_after_a_forward_that_synchronised():
    local, synchronised = ["broadcast"], ["all_reduce"]
    assert (
        launch(buffers_while_accumulating)
        == [[local, [], synchronised, ["broadcast", "all_reduce"]]] * 2
    )


def what_a_wrapper_leaves():
    model = DistributedDataParallel(nn.Sequential(line(), line()))
    module = model.module
    model(torch.ones(1, 1)).sum().backward()
    gone = [weakref.ref(part) for part in (model, model.reducer, *model.buckets)]
    del model
    gc.collect()
    hooks = [len(p._post_accumulate_grad_hooks) for p in module.parameters()]
    return [ref() is None for ref in gone], hooks


def test_a_wrapper_that_is_gone_leaves_neither_hooks_nor_buckets():
    assert launch(what_a_wrapper_leaves) == [([True] * 3, [0, 0])] * 2


class Breaks(nn.Sequential):
    """Backward raises between the second layer and the first, where ``breaks=True``."""

    def forward(self, x, breaks=False):
        x = self[0](x)
        return self[1](Boom.apply(x) if breaks else x)


def after_a_failure():
    model = DistributedDataParallel(Breaks(line(), line()), **SMALLEST)
    counts = []
    for breaks in (False, False, True, False, False):
        model.zero_grad()
        with record() as events:
            try:
                model(torch.ones(1, 1), breaks=breaks).sum().backward()
            except ValueError:
                counts.append("broken")
            else:
                counts.append(kinds(events).count("all_reduce"))
    return counts


def test_a_broken_backward_is_completed_for_the_others_by_the_next_forward():
    # There is one bucket until the first backward has ended, then two. One was sent before the
    # exception; the other follows in the next step, with NaN in it, and so does the question who
    # broke off.
    assert launch(after_a_failure) == [[1, 2, "broken", 4, 2]] * 2


def test_buckets_are_cut_once_in_the_order_of_the_first_backward():
    before, after = launch(bucket_names)[0]
    assert before == [["b.weight", "a.weight", "c.weight"]]
    assert after == [["c.weight"], ["a.weight"], ["b.weight"]]


def bucket_names():
    """The buckets before and after a backward in which gradients come as c, a, b."""
    module = chain("b", "a", "c")
    model = DistributedDataParallel(module, **SMALLEST)
    before = [bucket.names for bucket in model.buckets]
    step_on_ones(model)
    after = [bucket.names for bucket in model.buckets]
    step_on_ones(model)
    assert after == [bucket.names for bucket in model.buckets], "they change only once"
    return before, after


def step_on_ones(model):
    model(torch.ones(1, 1)).sum().backward()


def test_the_order_is_that_of_rank_0_on_every_rank():
    first, second = launch(names_where_ranks_differ)
    assert first == second == [["last.weight"], ["b.weight"], ["a.weight"]]


class Crossing(nn.Module):
    """a before b on rank 0, b before a on the others."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.last = line(), line(), line()

    def forward(self, x):
        x = self.b(self.a(x)) if dist.get_rank() == 0 else self.a(self.b(x))
        return self.last(x)


def names_where_ranks_differ():
    model = DistributedDataParallel(Crossing(), **SMALLEST)
    step_on_ones(model)
    return [bucket.names for bucket in model.buckets]


# Memory.


def memory(as_view):
    model = DistributedDataParallel(mlp(), gradient_as_bucket_view=as_view)
    for _ in range(3):
        step(model)
        model.zero_grad()
    step(model)
    gradients = {p.grad.untyped_storage().data_ptr(): p.grad for p in model.parameters()}
    buckets = {b.flat.untyped_storage().data_ptr() for b in model.buckets}
    return (
        sum(b.nbytes for b in model.buckets),
        sum(b.flat.untyped_storage().nbytes() for b in model.buckets),
        sum(p.grad.numel() * p.grad.element_size() for p in model.parameters()),
        buckets == set(gradients),
    )


@pytest.mark.parametrize("as_view", [False, True])
def test_buckets_take_as_many_bytes_as_the_gradients(as_view):
    told, taken, gradients, shared = launch(memory, as_view)[0]
    assert told == taken == gradients == BYTES
    assert shared is as_view  # gradients lie in the buckets: no second copy


# State dicts, and what a wrapper looks like.


def round_trips():
    """Names of the states, and whether each class loads what the other saved."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ours, theirs = DistributedDataParallel(WithBuffers()), TORCHS(WithBuffers())
    saved = {k: v.clone() for k, v in ours.state_dict().items()}
    names = list(saved) == list(theirs.state_dict())
    step(ours)
    theirs.load_state_dict(saved)
    forth = all(torch.equal(v, saved[k]) for k, v in theirs.state_dict().items())
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(1)
    saved = {k: v.clone() for k, v in theirs.state_dict().items()}
    ours.load_state_dict(saved)
    back = all(torch.equal(v, saved[k]) for k, v in ours.state_dict().items())
    return names, forth, back, "module.layer.weight" in saved


def test_state_dicts_go_to_torchs_class_and_back():
    assert launch(round_trips) == [(True, True, True, True)] * 2


def test_repr_shows_the_buckets_in_launch_order():
    text = launch(repr_after_a_step)[0]
    assert "world size 2, 3 bucket(s) in launch order:" in text
    places = [text.index(f"{name}.weight") for name in ("c", "b", "a")]
    assert places == sorted(places)
    assert "(c): Linear(in_features=1, out_features=1, bias=False)" in text


def repr_after_a_step():
    model = DistributedDataParallel(chain("a", "b", "c"), **SMALLEST)
    step_on_ones(model)
    return repr(model)


# Arguments.

PARAMETERS = inspect.signature(TORCHS).parameters
UNSUPPORTED = {
    "mixed_precision": object(),
    "delay_all_reduce_named_params": [("weight", None)],
    "param_to_hook_all_reduce": nn.Parameter(torch.ones(1)),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_torchs_argument(name):
    ours = inspect.signature(DistributedDataParallel).parameters
    assert ours[name].default == PARAMETERS[name].default
    assert list(ours).index(name) == list(PARAMETERS).index(name)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_argument_that_is_not_supported_says_so(name):
    with pytest.raises(NotImplementedError, match=name):
        DistributedDataParallel(line(), **{name: UNSUPPORTED[name]})


WRONG = [
    ({"module": 3}, TypeError, "module"),
    ({"module": "line"}, TypeError, "module"),
    ({"bucket_cap_mb": -1}, ValueError, "bucket size"),
    ({"bucket_cap_mb": 0}, ValueError, "bucket size"),
    ({"bucket_cap_mb": "25"}, ValueError, "bucket size"),
    ({"bucket_cap_mb_list": [1, -1]}, ValueError, "bucket size"),
    ({"bucket_cap_mb_list": [None, "1"]}, ValueError, "bucket size"),
    ({"device_ids": [0, 1]}, ValueError, "device_ids"),
    ({"device_ids": [0]}, ValueError, "device_ids"),
    ({"output_device": 1}, ValueError, "output_device"),
    ({"module": nn.LazyLinear(1)}, RuntimeError, "uninitialized"),
    ({"module": nn.SyncBatchNorm(1)}, ValueError, "SyncBatchNorm"),
    ({"module": nn.Module()}, RuntimeError, "not needed"),
]


@pytest.mark.parametrize("given, kind, words", WRONG, ids=[str(list(g)) for g, _, _ in WRONG])
def test_a_wrong_argument(given, kind, words):
    with pytest.raises(kind, match=words):
        DistributedDataParallel(**{"module": line(), **given})


DEPRECATED = [{"broadcast_buffers": True}, {"broadcast_buffers": False}, {"check_reduction": True}]


@pytest.mark.parametrize("given", DEPRECATED, ids=str)
def test_a_deprecated_argument_warns_at_the_callers_line(given):
    with pytest.warns(FutureWarning, match=list(given)[0]) as caught:
        DistributedDataParallel(line(), **given)
    assert caught[0].filename == __file__


def both_groups():
    mesh = dist.init_device_mesh("cpu", (2,))
    try:
        DistributedDataParallel(line(), process_group=dist.group.WORLD, device_mesh=mesh)
    except RuntimeError as error:
        return str(error)


def test_a_group_and_a_mesh_are_too_much():
    assert (
        launch(both_groups) == ["Cannot specify both process_group and device_mesh arguments."] * 2
    )


# A world of one, and a module with nothing to train.


def test_without_a_group_it_is_a_world_of_one():
    torch.manual_seed(0)
    model, alone = DistributedDataParallel(mlp()), mlp()
    alone.load_state_dict(model.module.state_dict())
    with model.no_sync(), model.join():
        loss_of(model(batch(0, 0))).backward()
    loss_of(model(batch(0, 1))).backward()
    for iteration in range(2):
        loss_of(alone(batch(0, iteration))).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert "world of one" in repr(model)
    assert model.buckets == []


def test_other_ranks_seem_to_be_meant(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2.*init_process_group"):
        DistributedDataParallel(line())


@pytest.mark.parametrize("size", ["1", ""])
def test_a_world_size_of_one_is_no_reason_to_raise(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert "world of one" in repr(DistributedDataParallel(line()))


CHILD = """
import multiprocessing, warnings
import torch
from ddp_teach import DistributedDataParallel

def child(connection):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            DistributedDataParallel(torch.nn.Linear(1, 1))
    connection.send([str(w.message) for w in caught])

if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start()
    print(len(ours.recv()), "warning")
    process.join()
"""


def test_a_child_process_without_a_group_warns_once(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environ, timeout=60
    )
    assert ran.stdout == "1 warning\n", ran.stderr


class Nothing(nn.Module):
    """No parameter, but a buffer, and several kinds of arguments."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x, *others, plus=0.0):
        return x * self.scale + plus, others


def passed_through():
    x = torch.ones(3)
    with record() as events:
        for module in (Nothing(), line().requires_grad_(False)):
            model = DistributedDataParallel(module)
            events.clear()
            if isinstance(module, Nothing):
                output, others = model(x, "other", plus=1.0)
            else:
                model(torch.ones(1, 1))
    return output.tolist(), others, kinds(events)


def test_a_module_without_parameters_passes_calls_through():
    assert launch(passed_through) == [([3.0] * 3, ("other",), [])] * 2
