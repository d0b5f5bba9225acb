"""The check of one step: right wrappers in several styles pass, every planted fault is named."""

import pytest
from planted import assert_is_named, assert_passes
from planted_overlap import OVERLAP, RIGHT_ELSEWHERE

pytestmark = pytest.mark.overlap


@pytest.mark.parametrize("cls", [*OVERLAP.right, *RIGHT_ELSEWHERE])
def test_a_right_wrapper_passes(cls):
    assert_passes(OVERLAP, cls)


@pytest.mark.parametrize(("cls", "words"), OVERLAP.wrong)
def test_a_planted_fault_is_named(cls, words):
    assert_is_named(OVERLAP, cls, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("cls", "words"), OVERLAP.rare)
def test_a_rarer_fault_is_named(cls, words):
    assert_is_named(OVERLAP, cls, words)
