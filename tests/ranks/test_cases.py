"""Programs that real wrappers got wrong: ours gives the right mean on every rank, or an error
before an optimizer can step. What torch's class gives is checked as well, so that each claim about
it stays true."""

import functools
from typing import Any

import pytest
from cases import CASES, HANGS, RACES, ByRank, import_all, run
from torch import nn

from ddp_teach import DistributedDataParallel, LaunchError, launch

import_all()
ENOUGH = 100.0  # seconds, for any machine, however slow


@functools.cache
def section(
    wrapper: type[nn.Module], nprocs: int, name: str
) -> tuple[list[dict[str, Any]], LaunchError | None]:
    """What every rank got, by case: those of a section that can run one after the other, in one
    launch. If that fails, its error as well: no test launches the same again."""
    names = [n for n, case in CASES.items() if case.nprocs == nprocs and not case.alone]
    names = [n for n in names if n.startswith(f"{name}.")]
    try:
        return launch(run, names, wrapper, nprocs=nprocs, timeout=ENOUGH), None
    except LaunchError as error:
        return [], error


def outcome(name: str, wrapper: type[nn.Module], timeout: float = ENOUGH) -> list[Any]:
    """What the case gives with this class, in rank order."""
    case = CASES[name]
    if case.alone:
        results = launch(run, [name], wrapper, nprocs=case.nprocs, timeout=timeout)
    else:
        results, error = section(wrapper, case.nprocs, name.partition(".")[0])
        if error is not None:
            pytest.fail(str(error))
    return [result[name] for result in results]


def on_each_rank(expected: Any, nprocs: int) -> list[Any]:
    return [for_rank(expected, rank) for rank in range(nprocs)]


def for_rank(expected: Any, rank: int) -> Any:
    """``expected`` as rank ``rank`` should see it."""
    if isinstance(expected, ByRank):
        return expected.values[rank]
    if isinstance(expected, list | tuple):
        return type(expected)(for_rank(part, rank) for part in expected)
    return expected


@pytest.mark.parametrize("name", CASES)
def test_ours(name):
    expected = on_each_rank(CASES[name].ours, CASES[name].nprocs)
    assert outcome(name, DistributedDataParallel) == expected


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].torch is not RACES])
def test_torch(name):
    case, theirs = CASES[name], nn.parallel.DistributedDataParallel
    if case.torch is HANGS:
        with pytest.raises(LaunchError):
            outcome(name, theirs, timeout=5)
    else:
        assert outcome(name, theirs) == on_each_rank(case.torch, case.nprocs)


def test_a_case_can_fail():
    """Every comparison above is one of these."""
    assert for_rank([ByRank((1.0, 2.0)), 3.0], 1) == [2.0, 3.0]
    assert on_each_rank(1.5, 2) != [1.5, 2.0]
