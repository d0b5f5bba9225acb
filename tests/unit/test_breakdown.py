"""Where the time of a step goes: the clock's arithmetic, which parts are seen; never how long."""

from collections import Counter
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ddp_teach import breakdown, launch
from ddp_teach.breakdown import PARTS, UNSPLIT, WRAPPERS, PartClock
from ddp_teach.buckets import Bucket
from ddp_teach.reducer import Reducer

NARROW = 400  # parameters of the workload `narrow`, which fit into one bucket


def test_time_in_an_inner_part_does_not_count_for_the_outer_one():
    now = 0.0

    def passes(seconds):
        nonlocal now
        now += seconds

    with patch.object(breakdown.time, "perf_counter", lambda: now):
        clock = PartClock()
        passes(1)
        with clock.part("computing"):
            passes(2)
            clock.timed("hooks", lambda: (passes(4), clock.timed("copies", passes)(8)))()
            passes(16)
        passes(32)
        clock.timed("waiting", passes)(64)
    spent = {part: seconds for part, seconds in clock.seconds.items() if seconds}
    assert spent == {"outside": 33, "computing": 18, "hooks": 4, "copies": 8, "waiting": 64}


def test_a_part_ends_when_it_raises():
    clock = PartClock()
    with pytest.raises(ZeroDivisionError):
        clock.timed("hooks", lambda: 1 / 0)()
    assert clock.open == ["outside"]


class CountingClock(PartClock):
    """Also notes how often each part began."""

    def part(self, name):
        self.begun[name] += 1
        return super().part(name)

    def restart(self):
        super().restart()
        self.begun = Counter()


def parts_begun():
    """By wrapper, how often each part began in its second step."""
    clock, begun = CountingClock(), {}
    with breakdown.watched(clock):
        for name, wrap in WRAPPERS.items():
            model, x = breakdown.WORKLOADS["narrow"]()
            model = wrap(model)
            for _ in range(2):
                seconds = breakdown.run_step(model, x, clock)
            assert sum(seconds) == pytest.approx(sum(clock.seconds[part] for part in PARTS))
            begun[name] = dict(clock.begun)
    return begun


def test_parts_of_every_wrapper():
    for begun in launch(parts_begun):
        nothing = {"forward": 1, "computing": 1}
        assert begun["bare"] == begun["ForwardOnly"] == begun["SameStart"] == nothing
        assert begun["torch"] == {"forward": 1, UNSPLIT: 1}
        after, overlapped = begun["AverageAfterBackward"], begun["OverlappedHooks"]
        assert after == nothing | {"hooks": 1, "copies": NARROW, "waiting": NARROW}
        assert overlapped["hooks"] == overlapped["starting"] == overlapped["waiting"] == NARROW
        for name in ("Buckets", "ours"):
            assert begun[name]["hooks"] >= NARROW
            assert begun[name]["starting"] == begun[name]["waiting"] == 1
            assert 2 <= begun[name]["copies"] <= 4
            assert UNSPLIT not in begun[name]


def test_what_is_replaced_is_put_back():
    before = dist.all_reduce, Bucket.pack, Reducer._gradient_hook, Reducer.complete
    with breakdown.watched(PartClock()):
        assert Bucket.pack is not before[1]
    assert before == (dist.all_reduce, Bucket.pack, Reducer._gradient_hook, Reducer.complete)


def fake_rank(workload, steps):
    lengths = iter([9.0, 9.0, 3.0, 1.0, 2.0])  # two steps to warm up, then three

    def run_step(model, x, clock):
        return [next(lengths), 0.5]

    with (
        patch.object(breakdown, "WRAPPERS", {"bare": lambda module: module}),
        patch.object(breakdown, "WARM_UP_STEPS", 2),
        patch.object(breakdown, "run_step", run_step),
    ):
        return breakdown.measure(workload, steps)


def test_told_is_the_middle_step_after_warming_up():
    assert fake_rank("linear", 3) == {"bare": [2.0, 0.5]}


def test_breakdown_runs_and_its_table_adds_up():
    bars = breakdown.breakdown("linear", steps=1)
    assert list(bars) == list(WRAPPERS)
    head, *rows = breakdown.table(bars).splitlines()
    assert head.split()[-1] == "total"
    for name, row in zip(bars, rows, strict=True):
        assert len(bars[name]) == len(PARTS)
        assert row.split()[0] == name
        assert float(row.split()[-1]) == pytest.approx(1e3 * sum(bars[name]), abs=0.01)
