"""The sweep over numbers of ranks: that it measures what it says, and how a step is predicted."""

import pytest
import torch.distributed as dist

from ddp_teach import launch, rank_sweep
from ddp_teach.cost_model import Network, Sample
from ddp_teach.rank_sweep import Step, predicted_seconds, step_table, sweep


def test_each_round_is_as_long_as_its_slowest_rank_and_the_median_is_told(monkeypatch):
    two = {(2, 8): [1.0, 5.0, 2.0], (2, "bare"): [1.0, 1.0, 2.0], (2, "ours"): [3.0, 3.0, 3.0]}
    three = {(3, 8): [1.0, 1.0, 1.0], (3, "bare"): [4.0, 4.0, 4.0], (3, "ours"): [5.0, 5.0, 5.0]}

    def launched(fn, ranks, sizes, rounds, workload, nprocs, timeout):
        assert (ranks, sizes, rounds, workload, nprocs) == ([2, 3], [8], 3, "linear", 3)
        slower = two | {(2, 8): [4.0, 1.0, 1.0], (2, "bare"): [1.0, 3.0, 1.0]}
        return [two | three, slower | three, three | {(3, 8): [2.0, 3.0, 9.0]}]

    monkeypatch.setattr(rank_sweep, "launch", launched)
    samples, steps = sweep([2, 3], [8], 3, "linear")
    assert samples == [Sample(2, 8, 4.0), Sample(3, 8, 3.0)]
    nbytes = 4 * (64 * 64 + 64)
    assert steps == [Step(2, 2.0, 3.0, nbytes), Step(3, 4.0, 5.0, nbytes)]


def test_a_step_is_predicted_as_computing_and_then_one_all_reduce():
    step = Step(ranks=2, bare=3.0, ours=8.0, nbytes=1000)
    network = Network(alpha=0.25, beta=500.0)
    assert predicted_seconds(step, network) == 3.0 + 2 * (0.25 + 1.0)
    row = step_table([step], network).splitlines()[1]
    assert row.split() == ["2", "3000.00", "2500.00", "5500.00", "8000.00", "-31", "%"]


def test_a_workload_of_several_buckets_is_refused():
    with pytest.raises(ValueError, match="'mlp' fill more than one bucket"):
        sweep(workload="mlp")


def things_timed(nbytes):
    """By what is timed: how often in a turn, and the bytes of the all-reduces that one call is."""
    sent, all_reduce, found = [], dist.all_reduce, {}

    def noted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = noted
    for what, call, repeats in rank_sweep.things_to_time(dist.group.WORLD, nbytes, "linear"):
        sent.clear()
        call()
        found[what] = repeats, [*sent]
    dist.all_reduce = all_reduce
    return found


def test_what_is_timed_sends_what_it_says():
    for found in launch(things_timed, [1 << 10, 1 << 20, 1 << 23]):
        assert found == {
            1 << 10: (10, [1 << 10]),
            1 << 20: (4, [1 << 20]),
            1 << 23: (1, [1 << 23]),
            "bare": (2, []),
            "ours": (2, [4 * (64 * 64 + 64)]),
        }


def test_sweep_runs_on_real_ranks():
    samples, steps = sweep([2, 3], [1024, 4096], rounds=2, workload="linear")
    assert [(s.ranks, s.nbytes) for s in samples] == [(2, 1024), (2, 4096), (3, 1024), (3, 4096)]
    assert [step.ranks for step in steps] == [2, 3]
    assert all(s.seconds > 0 for s in samples) and all(s.bare > 0 and s.ours > 0 for s in steps)
