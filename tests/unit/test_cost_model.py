"""The cost model: its arithmetic, its fit on samples that were made up, and that measuring runs."""

import random

import pytest

from ddp_teach.clusters import CLUSTERS, LI_2020
from ddp_teach.cost_model import (
    Network,
    Sample,
    all_reduce_seconds,
    efficiency,
    errors_by_ranks,
    fit,
    relative_error,
    step_bounds,
    table,
)

SIZES = (1_000, 100_000, 10_000_000)


def test_two_ranks_send_two_halves():
    # two messages of 500 bytes, one after the other
    assert all_reduce_seconds(1000, 2, Network(alpha=0.25, beta=500.0)) == 2 * (0.25 + 1.0)


def test_four_ranks_send_six_quarters():
    assert all_reduce_seconds(4000, 4, Network(alpha=0.5, beta=1000.0)) == 6 * (0.5 + 1.0)


def test_one_rank_has_nothing_to_send():
    assert all_reduce_seconds(1e9, 1, Network(1.0, 1.0)) == 0


def test_latency_is_paid_for_every_bucket_bytes_are_paid_once():
    network = Network(alpha=1.0, beta=1000.0)
    one, five = (all_reduce_seconds(4000, 4, network, messages=n) for n in (1, 5))
    assert five - one == 4 * 6 * network.alpha


def test_bytes_cost_at_most_double_however_many_ranks():
    network = Network(alpha=0.0, beta=1.0)
    costs = [all_reduce_seconds(1.0, n, network) for n in (2, 8, 64, 1024)]
    assert costs[0] == 1.0
    assert costs == sorted(costs)
    assert 1.99 < costs[-1] < 2.0


@pytest.mark.parametrize("wrong", [(1.0, 0, 1), (1.0, 2, 0), (-1.0, 2, 1)])
def test_what_makes_no_sense_is_refused(wrong):
    nbytes, ranks, messages = wrong
    with pytest.raises(ValueError, match=f"ranks={ranks}, messages={messages}"):
        all_reduce_seconds(nbytes, ranks, Network(1.0, 1.0), messages)


def test_step_bounds_overlap_all_or_nothing():
    assert step_bounds(3.0, 2.0) == (3.0, 5.0)
    assert step_bounds(1.0, 2.0) == (2.0, 3.0)
    assert efficiency(3.0, 5.0) == 0.6


def test_ranks_that_share_cores_take_turns():
    alone, crowded = Network(0.25, 500.0), Network(0.25, 500.0, cores=2)
    for ranks, times_longer in ((2, 1), (3, 1.5), (8, 4)):
        longer = all_reduce_seconds(1000, ranks, crowded) / all_reduce_seconds(1000, ranks, alone)
        assert longer == times_longer


def made_up(network, factors=(1.0,)):
    draw = random.Random(0).choice
    return [
        Sample(n, size, draw(factors) * all_reduce_seconds(size, n, network))
        for n in (2, 3, 4, 8)
        for size in SIZES
    ]


@pytest.mark.parametrize("network", [Network(1e-5, 1e9), Network(3e-4, 2e10), Network(2e-6, 1e8)])
def test_fit_finds_the_network_that_made_the_samples(network):
    found = fit(made_up(network))
    assert found.alpha == pytest.approx(network.alpha, rel=1e-6)
    assert found.beta == pytest.approx(network.beta, rel=1e-6)
    assert max(errors_by_ranks(made_up(network), found).values()) < 1e-6


def test_fit_knows_how_many_cores_there_are():
    network = Network(1e-5, 1e9, cores=2)
    found = fit(made_up(network), cores=2)
    assert (found.alpha, found.beta) == pytest.approx((network.alpha, network.beta), rel=1e-6)
    assert found.cores == 2
    assert fit(made_up(network)).alpha > 1.5 * network.alpha


def test_fit_stands_noise_of_a_tenth_up_or_down():
    network = Network(1e-5, 1e9)
    found = fit(made_up(network, factors=(1 / 1.1, 1.1)))
    assert found.alpha == pytest.approx(network.alpha, rel=0.1)
    assert found.beta == pytest.approx(network.beta, rel=0.1)


def test_fit_takes_small_all_reduces_as_seriously_as_large_ones():
    # A least-squares fit of the seconds themselves would only see the one of 10 MB.
    network = Network(1e-3, 1e12)
    samples = made_up(network)
    found = fit([*samples, Sample(2, 10**9, 2 * all_reduce_seconds(10**9, 2, network))])
    assert found.alpha == pytest.approx(network.alpha, rel=0.1)


def test_fit_of_latency_alone_leaves_no_time_for_bytes():
    found = fit([Sample(n, size, 2 * (n - 1) * 1e-4) for n in (2, 4) for size in SIZES])
    assert found.alpha == pytest.approx(1e-4, rel=1e-3)
    assert all_reduce_seconds(SIZES[-1], 4, found) == pytest.approx(6e-4, rel=1e-3)


@pytest.mark.parametrize("samples", [[], [Sample(2, 10, 1.0)], [Sample(1, 10, 1.0)] * 3])
def test_fit_needs_samples(samples):
    with pytest.raises(ValueError, match="two samples"):
        fit(samples)


def test_error_has_a_sign_and_is_a_share_of_what_was_measured():
    network = Network(0.5, 1e30)
    assert relative_error(Sample(2, 0, 2.0), network) == -0.5
    assert relative_error(Sample(2, 0, 0.5), network) == 1.0
    samples = [Sample(2, 0, 2.0), Sample(2, 0, 0.5), Sample(2, 0, 1.0), Sample(4, 0, 3.0)]
    assert errors_by_ranks(samples, network) == {2: 0.5, 4: 0.0}


def test_table_tells_measured_from_modelled():
    text = table([Sample(2, 1000, 0.004)], Network(1e-3, 1e30))
    assert text.splitlines()[1].split() == ["2", "1,000", "4.000", "2.000", "-50", "%"]
    assert "alpha 1000.0 microseconds" in text
    assert "2 ranks: median error 50 %" in text


# Clusters, as published.


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=list(CLUSTERS))
def test_a_ring_beyond_a_server_is_slowed_down_by_its_network(cluster):
    assert cluster.network(8) is cluster.within
    for ranks in (16, 1024):
        network = cluster.network(ranks)
        assert cluster.within.alpha < network.alpha < cluster.between.alpha
        assert network.beta == cluster.between.beta < cluster.within.beta


def test_seven_of_eight_hops_stay_within_a_server():
    cluster = CLUSTERS["V100, 100 Gb/s a server"]
    assert 8 * cluster.network(64).alpha == pytest.approx(7 * 3.4e-6 + 9.6e-6)


def test_every_published_figure_has_a_source_and_a_sensible_size():
    for cluster in CLUSTERS.values():
        for network in (cluster.within, cluster.between):
            assert "NCCL" in network.source and "bandwidth:" in network.source
            assert 1e-6 < network.alpha < 1e-4 and 1e10 <= network.beta < 1e12
    assert "VLDB 2020" in LI_2020.source
