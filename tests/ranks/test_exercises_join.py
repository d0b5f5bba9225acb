"""The check of step join: right wrappers of several styles pass, planted faults are named."""

import pytest
from complete_wrappers import COMPLETE
from in_one_launch import assert_is_named, assert_is_stopped, find_all
from planted_join import JOIN, STOPPED

pytestmark = pytest.mark.join

RIGHT = [*COMPLETE, *JOIN.right]


@pytest.fixture(scope="module")
def found():
    return find_all("join", [*RIGHT, *(cls for cls, _ in JOIN.wrong)])


@pytest.mark.parametrize("cls", RIGHT)
def test_a_right_wrapper_passes(found, cls):
    assert found[cls] == []


@pytest.mark.parametrize(("cls", "words"), JOIN.wrong)
def test_a_planted_fault_is_named(found, cls, words):
    assert_is_named(found[cls], words)


@pytest.mark.parametrize(("cls", "words"), STOPPED.wrong)
def test_a_wrapper_that_ends_the_launch_is_told_why(cls, words):
    assert_is_stopped("join", cls, words)
