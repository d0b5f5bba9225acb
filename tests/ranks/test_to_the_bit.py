"""Trained with our class and with torch's, a model ends with the same numbers to the bit.

A failure names its spec; ``pytest tests/ranks/test_to_the_bit.py -k "[17]"`` runs spec 17 alone,
``-m nightly`` many more.
"""

import pytest
from specs import BUILDERS, differences, draw

from ddp_teach import launch

IN_CI, NIGHTLY = range(40), range(40, 400)


@pytest.fixture(scope="module")
def results(request):
    """By number, what differs on each rank: for all specs selected, in one launch a world size."""
    items = [item for item in request.session.items if item.fspath == request.node.fspath]
    numbers = [item.callspec.params["number"] for item in items if hasattr(item, "callspec")]
    found = {}
    for nprocs in sorted({draw(number).nprocs for number in numbers}):
        those = [number for number in numbers if draw(number).nprocs == nprocs]
        ranks = launch(differences, those, nprocs=nprocs, timeout=20 + 5 * len(those))
        found |= {number: [rank[number] for rank in ranks] for number in those}
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "number", [*IN_CI, *(pytest.param(n, marks=pytest.mark.nightly) for n in NIGHTLY)]
)
def test_same_to_the_bit(results, number):
    spec = draw(number)
    assert results[number] == [[]] * spec.nprocs, spec


def test_specs_drawn_in_ci_are_of_every_kind():
    specs = [draw(number) for number in IN_CI]
    assert {spec.model for spec in specs} == set(BUILDERS)
    assert {spec.nprocs for spec in specs} == {2, 3, 4}
    assert {spec.optimizer for spec in specs} == {"SGD", "Adam"}
    assert {True, False} == {spec.set_to_none for spec in specs}
    options = {name for spec in specs for name in spec.options}
    assert options >= {"bucket_cap_mb", "gradient_as_bucket_view", "static_graph"}
    assert any(spec.micro_batches > 1 for spec in specs)
