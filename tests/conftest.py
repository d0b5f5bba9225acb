"""What every test gets: nothing that it leaves behind may reach the next one."""

import os
import sys

import pytest


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was():
    """The environment is the same after a test, and no process group is left."""
    before = environment()
    yield
    assert environment() == before, "the test changed os.environ"
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized(), "a process group is left"


def environment():
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
