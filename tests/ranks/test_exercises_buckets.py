"""The check of one step: right wrappers in several styles pass, every planted fault is named."""

import pytest
from planted import assert_is_named, assert_passes
from planted_buckets import BUCKETS, RIGHT_ELSEWHERE

pytestmark = pytest.mark.buckets


@pytest.mark.parametrize("cls", [*BUCKETS.right, *RIGHT_ELSEWHERE])
def test_a_right_wrapper_passes(cls):
    assert_passes(BUCKETS, cls)


@pytest.mark.parametrize(("cls", "words"), BUCKETS.wrong)
def test_a_planted_fault_is_named(cls, words):
    assert_is_named(BUCKETS, cls, words)


@pytest.mark.nightly
@pytest.mark.parametrize(("cls", "words"), BUCKETS.rare)
def test_a_rarer_fault_is_named(cls, words):
    assert_is_named(BUCKETS, cls, words)
