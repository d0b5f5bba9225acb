"""The host's cost at large world sizes: counted, never timed."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import ddp_teach
from ddp_teach import DDP, host_cost, launch

SIZES = (50, 100, 150)


def python_calls(step):
    """How many calls of functions of ours, and of which, one step makes."""
    folder, calls = ddp_teach.__path__[0], {}

    def count(frame, event, _argument):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            name = frame.f_code.co_name
            calls[name] = calls.get(name, 0) + 1

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


class CountingGroup(host_cost.InstantGroup):
    """Notes the bytes of every all-reduce; nothing else may be sent in a step."""

    nbytes: list[int] = []  # a rank has one group

    def allreduce(self, tensors, options):
        self.nbytes += [tensor.nbytes for tensor in tensors]
        return super().allreduce(tensors, options)


def counts_of_a_step(world_size, cap_mb=None, wrap=DDP):
    """By number of parameters: bytes of each all-reduce, and calls of our functions."""
    host_cost.InstantGroup = CountingGroup
    host_cost.use_instant_group(world_size)
    rows = []
    for n in SIZES:
        step = host_cost.step_of(wrap(host_cost.ManyParameters(n), bucket_cap_mb=cap_mb))
        for _ in range(3):
            step()
        CountingGroup.nbytes.clear()
        step()
        rows.append(([*CountingGroup.nbytes], python_calls(step)))
    return rows


def test_a_step_sends_every_gradient_once_in_one_bucket():
    [ours] = launch(counts_of_a_step, 1024, nprocs=1)
    [torchs] = launch(counts_of_a_step, 1024, wrap=TorchDDP, nprocs=1)
    for n, (nbytes, _), (torchs_nbytes, _) in zip(SIZES, ours, torchs, strict=True):
        assert nbytes == torchs_nbytes == [4 * n]


def test_python_calls_grow_linearly_one_hook_a_parameter():
    [rows] = launch(counts_of_a_step, 1024, nprocs=1)
    small, middle, large = (calls for _, calls in rows)
    for n, calls in zip(SIZES, (small, middle, large), strict=True):
        assert calls["gradient_ready"] == n
    each = (sum(middle.values()) - sum(small.values())) / 50
    assert each == (sum(large.values()) - sum(middle.values())) / 50  # no square, no logarithm
    assert each <= 2, {name: middle[name] - small.get(name, 0) for name in middle}


def test_a_step_is_the_same_on_2_and_on_1024_ranks():
    [few], [many] = (launch(counts_of_a_step, n, nprocs=1) for n in (2, 1024))
    assert few == many


def test_buckets_add_a_fixed_number_of_calls_each():
    [one], [several] = (launch(counts_of_a_step, 8, cap, nprocs=1) for cap in (None, 100 / 2**20))
    for n, (nbytes, calls), (_, calls_of_one) in zip(SIZES, several, one, strict=True):
        buckets = n // 25
        assert nbytes == [100] * buckets
        assert calls["gradient_ready"] == n
        assert sum(calls.values()) - sum(calls_of_one.values()) <= 20 * (buckets - 1)


def gradients(world_size):
    host_cost.use_instant_group(world_size)
    found = []
    for wrap in (DDP, TorchDDP):
        model = wrap(host_cost.ManyParameters(3))
        host_cost.step_of(model)()
        found.append([p.grad.item() for p in model.parameters()])
    return dist.get_world_size(), found


def test_both_classes_work_in_the_instant_group():
    # 1 from this rank, divided by the world size; the sum with the others is left out.
    [(world_size, found)] = launch(gradients, 1024, nprocs=1)
    assert world_size == 1024
    assert found == [[1 / 1024] * 3] * 2


def test_what_is_added_is_the_step_less_the_bare_one(monkeypatch):
    seconds = {"bare": 1.0, "torch": 5.0, "ours": 3.0}
    monkeypatch.setattr(host_cost, "use_instant_group", lambda world_size: None)
    monkeypatch.setattr(host_cost, "VARIANTS", {name: lambda m: m for name in seconds})
    steps = iter([*seconds, *seconds])
    monkeypatch.setattr(host_cost, "step_of", lambda model: next(steps))
    monkeypatch.setattr(host_cost, "seconds_of", lambda step, repeats: seconds[step])
    rows = host_cost.measure([10, 20], world_size=4, rounds=3)
    assert rows == [{"parameters": n, "bare": 1.0, "torch": 4.0, "ours": 2.0} for n in (10, 20)]


def test_table_shows_microseconds_and_the_ratio():
    row = {"parameters": 1000, "bare": 0.001, "torch": 0.004, "ours": 0.003}
    head, line = host_cost.table([row]).splitlines()
    assert head.split()[:5] == ["parameters", "bare", "torch", "ours", "ours/torch"]
    assert line.split() == ["1,000", "1,000", "4,000", "3,000", "0.75", "3.00"]


def test_host_cost_runs():
    [row] = host_cost.host_cost([5], world_size=8, rounds=1)
    assert row["parameters"] == 5
    assert set(row) == {"parameters", "bare", "torch", "ours"}
    assert row["bare"] > 0


@pytest.mark.parametrize("world_size", [1, 7])
def test_instant_group_gathers_copies_of_this_rank(world_size):
    [gathered] = launch(gather, world_size, nprocs=1)
    assert gathered == [3.0] * world_size


def gather(world_size):
    host_cost.use_instant_group(world_size)
    tensors = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(tensors, torch.tensor([3.0]))
    return [t.item() for t in tensors]
