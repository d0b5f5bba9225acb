"""Programs that real wrappers got wrong: ours gives the right mean on every rank, or an error
before an optimizer can step. What torch's class gives is checked as well, so that each claim about
it stays true."""

import functools

import pytest
from cases import CASES, HANGS, ByRank, import_all, run
from torch import nn

from ddp_teach import DistributedDataParallel, LaunchError, launch

import_all()
CLASSES = {"ours": DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}


@functools.cache
def outcomes(wrapper: str, nprocs: int, alone: str = "") -> list[dict]:
    """What every rank got: all cases for so many ranks in one launch, or one case alone."""
    names = [name for name, case in CASES.items() if case.nprocs == nprocs]
    if wrapper == "torch":
        names = [name for name in names if not CASES[name].alone]
    names = [alone] if alone else names
    return launch(run, names, CLASSES[wrapper], nprocs=nprocs, timeout=5 if alone else 90)


def for_rank(expected, rank):
    """``expected`` as rank ``rank`` should see it."""
    if isinstance(expected, ByRank):
        return expected.values[rank]
    if isinstance(expected, list | tuple):
        return type(expected)(for_rank(part, rank) for part in expected)
    return expected


@pytest.mark.parametrize("name", CASES)
def test_ours(name):
    case = CASES[name]
    results = outcomes("ours", case.nprocs)
    assert [r[name] for r in results] == [for_rank(case.ours, i) for i in range(case.nprocs)]


@pytest.mark.parametrize("name", CASES)
def test_torch(name):
    case = CASES[name]
    if case.torch is HANGS:
        with pytest.raises(LaunchError):
            outcomes("torch", case.nprocs, name)
        return
    results = outcomes("torch", case.nprocs, name if case.alone else "")
    assert [r[name] for r in results] == [for_rank(case.torch, i) for i in range(case.nprocs)]
