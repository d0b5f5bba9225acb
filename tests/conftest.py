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
    # pytest names the running test; torch sets a cache folder when it makes its first optimizer
    others = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
    return {name: value for name, value in os.environ.items() if name not in others}
