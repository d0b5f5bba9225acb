"""launch: a function on real ranks, from a test, a script, a notebook's kernel and torchrun."""

import builtins
import gc
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import launched
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from processes import folders, wait_for
from torch import nn

from ddp_teach import rank_process
from ddp_teach.launch import LaunchError, launch

# The ranks and what they are given.


@pytest.mark.parametrize("nprocs", [1, 2, 3, 8])
def test_results_in_rank_order(nprocs):
    total = nprocs * (nprocs + 1) // 2
    results = launch(launched.sum_of_ranks, 10, shift=1, nprocs=nprocs)
    assert results == [(rank, nprocs, total * 10 + 1) for rank in range(nprocs)]


def test_surroundings_of_a_rank(monkeypatch, tmp_path):
    launch(launched.surroundings)  # the server runs, with the environment as it was
    stale = {"RANK": "5", "LOCAL_RANK": "5", "WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "9"}
    for name, value in {**stale, "TORCHELASTIC_RUN_ID": "old", "CHANGED": "yes"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    results = launch(launched.surroundings)
    assert dict(os.environ) == before
    assert os.getcwd() == str(tmp_path)
    backend = "gloo" if torch.cuda.device_count() < 2 else "cpu:gloo,cuda:nccl"
    for rank, (env, folder, threads, found) in enumerate(results):
        assert env == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": None,
            "CHANGED": "yes",
        }
        assert (folder, threads, found) == (str(tmp_path), 1, backend)


def test_usual_port_may_be_taken(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", 29500))
        except OSError:
            pass  # taken it is
        else:
            listener.listen()
        assert launch(launched.sum_of_ranks) == [(0, 2, 3), (1, 2, 3)]


def test_nothing_beyond_loopback(monkeypatch):
    *_, (_, interface) = socket.if_nameindex()  # of a machine with a network not the loopback
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    for rank, in_use in launch(launched.addresses_in_use, os.getpid()):
        assert in_use[rank] == {"127.0.0.1"}
        assert len(in_use) >= 4  # the launching process, the server, two ranks
        assert set.union(*in_use.values()) == {"127.0.0.1"}


@pytest.mark.skipif(os.name == "nt", reason="has no such modes")
def test_folder_is_private():
    pattern = os.path.join(tempfile.gettempdir(), f"ddp_teach-{os.getpid()}-*")
    assert launch(launched.modes, pattern) == [["0o700"]] * 2


def test_process_group_of_the_caller():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = dist.group.WORLD
        assert launch(launched.sum_of_ranks) == [(0, 2, 3), (1, 2, 3)]
        with pytest.raises(LaunchError):
            launch(launched.talk_and_fail)
        assert dist.group.WORLD is before
        assert launched.sum_of_ranks() == (0, 1, 1)
    finally:
        dist.destroy_process_group()


def test_random_state(seed=7):
    seeds = torch.manual_seed, np.random.seed, random.seed
    for start in seeds:
        start(seed)
    expected = []
    for rank in range(2):
        for start in seeds:
            start(rank)
        expected.append(launched.draws())
    for start in seeds:
        start(seed)
    before = launched.draws()
    for start in seeds:
        start(seed)
    assert launch(launched.draws) == expected
    assert launch(launched.draws) == expected
    assert launched.draws() == before  # the caller's own was neither used nor changed
    assert expected[0] != expected[1]


def test_a_module_is_copied():
    model = nn.Linear(2, 1)
    before = [p.clone() for p in model.parameters()]
    trained = launch(launched.train, model)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    for copy in trained:
        assert torch.equal(copy.weight, model.weight - 1)


def test_large_results_are_values():
    for rank, result in enumerate(launch(launched.big)):
        assert result["note"] == "by value"
        result["all"][:] += 1
        assert torch.equal(result["some"], torch.full((2, 5000), rank + 2.0))  # one storage, still
        assert not result["all"].is_shared()


def test_caller_has_used_all_its_threads():
    size = 1500
    launched.product(size)
    assert launch(launched.product, size) == [size**3] * 2


def test_no_rank_runs_ahead_of_one_that_is_still_connecting(monkeypatch):
    monkeypatch.setattr(rank_process, "main", launched.second_rank_is_late)
    (first_ready, first_ran), (second_ready, second_ran) = launch(launched.when_ready_and_when_run)
    assert first_ready + 0.2 < second_ready < min(first_ran, second_ran)


@pytest.mark.slow
def test_launch_in_a_launch():
    assert launch(launched.nested, timeout=100) == [[(0, 2, 3), (1, 2, 3)]] * 2


def test_two_launches_at_once():
    with ThreadPoolExecutor() as pool:
        launches = [pool.submit(launch, launched.sum_of_ranks, i, nprocs=3) for i in range(4)]
    for i, running in enumerate(launches):
        assert running.result() == [(rank, 3, 6 * i) for rank in range(3)]


def test_without_a_forkserver(monkeypatch):
    monkeypatch.setattr(rank_process, "START_METHOD", "spawn")
    assert launch(launched.sum_of_ranks) == [(0, 2, 3), (1, 2, 3)]


# What ranks print.


SAID = """\
[rank 0] one 0
[rank 0] two 0
[rank 0] from C
[rank 0]
[rank 0] from a child
[rank 0] UserWarning: careful
[rank 0]  100%
[rank 0] ünïcödé
[rank 1] one 1
[rank 1] two 1
[rank 1] from C
[rank 1]
[rank 1] from a child
[rank 1] UserWarning: careful
[rank 1]  100%
[rank 1] ünïcödé
"""


def test_text_in_rank_order(capsys):
    assert launch(launched.talk) == [None, None]
    captured = capsys.readouterr()
    assert captured.out == SAID
    assert captured.err == ""


def test_text_of_a_failed_launch(capsys):
    with pytest.raises(LaunchError, match="on purpose"):
        launch(launched.talk_and_fail)
    assert capsys.readouterr().out == "[rank 0] before it failed\n[rank 1] before it failed\n"


@pytest.mark.parametrize("live", [True, False])
def test_live_text(live, monkeypatch, tmp_path):
    lines = []

    def show(line):  # the ranks go on once their text is seen; without live it is seen too late
        lines.append(line)
        (tmp_path / "seen").touch()

    monkeypatch.setattr(builtins, "print", show)
    seconds = 20 if live else 1
    results = launch(launched.wait_for_a_file_for, tmp_path / "seen", seconds, live=live)
    assert results == [live, live]
    assert sorted(lines) == ["[rank 0] ready", "[rank 1] ready"]


def test_endless_text_is_cut(capsys):
    launch(launched.print_a_lot, nprocs=1)
    lines = capsys.readouterr().out.splitlines()
    whole = sum(len(f"line {i}\n") for i in range(200_000))
    assert lines[0] == "[rank 0] line 0"
    assert lines[-1] == f"[rank 0] ... and {whole - rank_process.MOST_OUTPUT} bytes more"
    assert len("\n".join(lines)) < 3 * rank_process.MOST_OUTPUT


# Nothing is left.


def footprint():
    """What this process and those below it hold: the server that ranks are forked from stays."""
    process = psutil.Process()
    below = process.children(recursive=True)
    return {
        "file descriptors": {p.pid: p.num_fds() for p in (process, *process.children())},
        "threads": process.num_threads(),
        "processes": {p.pid for p in below},
        "temporary files": os.listdir(tempfile.gettempdir()),
    }


def memory():
    """Bytes of this process and of each of its children."""
    process = psutil.Process()
    return {p.pid: p.memory_info().rss for p in (process, *process.children())}


def shared_memory():
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


@pytest.mark.skipif(os.name == "nt", reason="counts file descriptors")
@pytest.mark.parametrize(
    "launches",
    [
        pytest.param(20, id="20"),
        pytest.param(200, id="200", marks=[pytest.mark.nightly, pytest.mark.timeout(900)]),
    ],
)
def test_launches_leave_nothing(launches, tmp_path, monkeypatch):
    launch(launched.sum_of_ranks)  # starts the server
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other programs use the usual folder
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    gc.collect()  # or what earlier tests have dropped would be closed in between
    before, bytes_before, shared_before = footprint(), memory(), shared_memory()
    for i in range(launches):
        with pytest.raises(LaunchError) if i % 10 == 9 else nullcontext():
            launch(launched.fail_on_ten, i)
    # The server takes a moment to note that a rank has ended; other programs' memory goes as well.
    assert wait_for(lambda: footprint() == before), f"{footprint()}, before {before}"
    assert wait_for(lambda: shared_memory() <= shared_before), shared_memory() - shared_before
    grown = {pid: now - bytes_before[pid] for pid, now in memory().items()}
    assert max(grown.values()) < 20 * 2**20, grown


# Arguments.


class Unprintable:
    """Neither it nor what it raises when it is pickled can be shown as text."""

    def __repr__(self):
        raise RuntimeError("no text")

    def __reduce__(self):
        raise UnprintableError


class UnprintableError(Exception):
    __str__ = Unprintable.__repr__


WHOLE, SECONDS = "a whole number from 1 to 256", "a number of seconds above 0"
BAD = [
    ({"fn": None}, TypeError, "fn must be a function (not its result), got None"),
    ({"fn": 3}, TypeError, "fn must be a function (not its result), got 3 (int)"),
    ({"fn": "f"}, TypeError, "fn must be a function (not its result), got 'f' (str)"),
    ({"nprocs": 0}, ValueError, f"nprocs must be {WHOLE}, got 0"),
    ({"nprocs": -1}, ValueError, f"nprocs must be {WHOLE}, got -1"),
    ({"nprocs": 257}, ValueError, f"nprocs must be {WHOLE}, got 257"),
    ({"nprocs": True}, TypeError, f"nprocs must be {WHOLE}, got True (bool)"),
    ({"nprocs": "2"}, TypeError, f"nprocs must be {WHOLE}, got '2' (str)"),
    ({"nprocs": 2.0}, TypeError, f"nprocs must be {WHOLE}, got 2.0 (float)"),
    ({"nprocs": None}, TypeError, f"nprocs must be {WHOLE}, got None"),
    ({"timeout": 0}, ValueError, f"timeout must be {SECONDS}, got 0"),
    ({"timeout": -1}, ValueError, f"timeout must be {SECONDS}, got -1"),
    ({"timeout": float("nan")}, ValueError, f"timeout must be {SECONDS}, got nan"),
    ({"timeout": float("inf")}, ValueError, f"timeout must be {SECONDS}, got inf"),
    ({"timeout": "60"}, TypeError, f"timeout must be {SECONDS}, got '60' (str)"),
    ({"timeout": None}, TypeError, f"timeout must be {SECONDS}, got None"),
    ({"timeout": True}, TypeError, f"timeout must be {SECONDS}, got True (bool)"),
    ({"live": 1}, TypeError, "live must be True or False, got 1 (int)"),
    ({"live": "yes"}, TypeError, "live must be True or False, got 'yes' (str)"),
    (
        {"nproc": 2},
        TypeError,
        "the arguments must fit sum_of_ranks(factor=1, *, shift=0), "
        "but: got an unexpected keyword argument 'nproc'",
    ),
    (
        {"args": (1, 2)},
        TypeError,
        "the arguments must fit sum_of_ranks(factor=1, *, shift=0), "
        "but: too many positional arguments",
    ),
]
LOCK = threading.Lock()
SENDABLE = "must be something that can be pickled, to be sent to other processes, got"
UNSENDABLE = [
    ({"args": (LOCK,)}, f"args[0] {SENDABLE} <unlocked _thread.lock"),
    ({"shift": (i for i in ())}, f"kwargs['shift'] {SENDABLE} <generator object"),
    ({"fn": lambda: LOCK}, f"fn {SENDABLE} <function <lambda>"),
    ({"args": (Unprintable(),)}, f"args[0] {SENDABLE} <test_launch.Unprintable object at"),
]


def message_of(arguments, kind):
    arguments = {"fn": launched.sum_of_ranks, **arguments}
    args = arguments.pop("args", ())
    with pytest.raises((TypeError, ValueError)) as caught:
        launch(arguments.pop("fn"), *args, **arguments)
    assert type(caught.value) is kind
    return str(caught.value)


def test_bad_arguments(monkeypatch):
    monkeypatch.setattr(rank_process.RankProcess, "start", None)  # no process may be started
    before = folders()
    for arguments, kind, message in BAD:
        assert message_of(arguments, kind) == f"launch: {message}"
    for arguments, message in UNSENDABLE:
        got = message_of(arguments, TypeError)
        assert got.startswith(f"launch: {message}")
        assert "\n" not in got
    assert folders() == before


# From a script, a kernel and torchrun.

SCRIPT = """
import pickle
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_teach import launch

print("the script runs")
factor = 2


@dataclass
class Point:
    x: int

    def scaled(self):
        return self.x * factor


class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * factor


def meet(model):
    points = [None] * dist.get_world_size()
    dist.all_gather_object(points, Point(dist.get_rank()))
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
    print(points, [point.scaled() for point in points])
    return Point(dist.get_rank() + 10), model


(ours, model), (theirs, _) = launch(meet, Net(1, 1, bias=False))
print(ours, theirs, type(theirs) is Point, type(model) is Net)
factor = 3
print(ours.scaled(), theirs.scaled())
try:
    launch(lambda: 1 / (dist.get_rank() - 1))
except RuntimeError as error:
    print(error)
"""

SCRIPT_SAYS = """\
the script runs
[rank 0] [Point(x=0), Point(x=1)] [0, 2]
[rank 1] [Point(x=0), Point(x=1)] [0, 2]
Point(x=10) Point(x=11) True True
30 33
rank 1 raised ZeroDivisionError: division by zero
  script.py, line 40, in <lambda>
    launch(lambda: 1 / (dist.get_rank() - 1))
"""


def run(*command, **kwargs):
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, **kwargs
    )


def test_script_without_a_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = run(str(script))
    assert ended.stderr == ""
    assert ended.stdout == SCRIPT_SAYS
    assert ended.returncode == 0


LOADER = """\
from torch.utils.data import DataLoader, Dataset
from ddp_teach import launch

class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return float(i)

def total():
    return sum(batch.sum().item() for batch in DataLoader(Numbers(), 2, num_workers=2))

print(total(), launch(total))
"""


@pytest.mark.skipif(
    multiprocessing.get_all_start_methods()[0] != "fork", reason="workers import the script again"
)
def test_a_data_loader_has_workers_in_a_rank_as_outside(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOADER)
    ended = run(str(script))
    assert ended.stdout == "28.0 [28.0, 28.0]\n", ended.stderr
    assert ended.stderr == ""


def test_script_as_a_module(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = run("-m", "script", cwd=tmp_path)
    assert ended.stdout == SCRIPT_SAYS, ended.stderr


CELLS = [
    """\
import torch
import torch.distributed as dist
from ddp_teach import launch

class Scale(torch.nn.Module):
    def forward(self, x):
        return x * factor

factor = 10""",
    """\
def work(scale):
    print("hello")
    if factor < 0:
        raise ValueError("factor is negative")
    return scale(torch.tensor(dist.get_rank())).item()
launch(work, Scale())""",
    "factor = -1\nlaunch(work, Scale())",
    "factor = 3\nlaunch(work, Scale())",
    "launch(lambda: dist.get_rank() or dist.barrier(), timeout=1)",
]


def texts(cell):
    """What a reader sees below a cell: printed text, results and the messages of errors."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "error":
            yield "\n".join(output.traceback)
        else:
            yield output.data["text/plain"]


def test_functions_of_a_notebook():
    import nbformat  # not above: ranks import this module, if their function is in it
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    NotebookClient(notebook, timeout=100, allow_errors=True).execute()
    hello = "[rank 0] hello\n[rank 1] hello\n"
    failed = (
        "LaunchError: rank 0 raised ValueError: factor is negative\n"
        "  notebook cell, line 4, in work\n"
        '    raise ValueError("factor is negative")'
    )
    late = (
        "LaunchTimeout: not all ranks returned within 1 s\n"
        "rank 0 is running\n"
        "  notebook cell, line 1, in <lambda>\n"
        "    launch(lambda: dist.get_rank() or dist.barrier(), timeout=1)\n"
        "rank 1 has returned\n"
        "collectives started: 1 on rank 0, 0 on rank 1"
    )
    assert [list(texts(cell)) for cell in notebook.cells] == [
        [],
        [hello, "[0, 10]"],
        [hello, failed],
        [hello, "[0, 3]"],
        [late],
    ]


UNDER_TORCHRUN = """
import torch.distributed as dist
from ddp_teach import launch

class Point:
    def __init__(self, x):
        self.x = x

def meet(shift):
    return Point(dist.get_rank() + shift)

for shift in 1, 2:
    points = launch(meet, shift, nprocs=3)
    if dist.get_rank() == 0:
        print([point.x for point in points], type(points[1]) is Point, flush=True)
"""


def test_torchrun_decides(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    ended = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    assert ended.returncode == 0, ended.stderr
    says = "launch: torchrun started 2 ranks, so nprocs=3 has no effect"
    assert ended.stdout.splitlines() == [says, "[1, 2] True", says, "[2, 3] True"]


CACHED = """\
import functools
from ddp_teach import launch

@functools.lru_cache(maxsize=7)
def doubled(n):
    return 2 * n

def work(fn):
    return doubled(fn), doubled.cache_info()[:3]

print(launch(work, fn=3))
"""


def test_a_cached_function_of_the_script_and_an_argument_called_fn(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CACHED)
    ended = run(str(script))
    assert ended.stdout == "[(6, (0, 1, 7)), (6, (0, 1, 7))]\n", ended.stderr
