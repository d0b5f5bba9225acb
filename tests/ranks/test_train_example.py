"""examples/train.py: the same weights however its ranks were started, even after a kill."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
from processes import wait_for

from ddp_teach import DDP, launch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import train  # noqa: E402

TorchDDP = torch.nn.parallel.DistributedDataParallel
SHORT = ("--epochs", "2", "--windows", "64")
LIMIT = 100  # seconds for one run of a script


def started(*command, stderr=subprocess.STDOUT):
    """The script as a process whose output goes to a file; its end of a pipe keeps it alive."""
    environ = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed when the process has ended
    how = {"stdin": subprocess.PIPE, "stdout": output, "stderr": stderr}
    process = subprocess.Popen([*map(str, command)], env=environ, cwd=ROOT, **how)
    process.output = output
    return process


def finished(process):
    """What the script printed, once it has ended well, and left nothing behind."""
    children = descendants(process)
    with process.output as output, process.stdin:
        try:
            process.wait(LIMIT)
        finally:
            process.kill()
            output.seek(0)
            printed = output.read()
        assert process.returncode == 0, printed
    assert wait_for(lambda: not any(child.is_running() for child in children))
    return printed


def descendants(process):
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_of(process):
    """The ranks below a running nodes.sh: not the shells and torchruns that started them."""
    found = []
    for child in descendants(process):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if child.cmdline()[1:3] == ["-u", "examples/train.py"]:
                found.append(child)
    return found


def nodes(number, *arguments, torchrun=(), **how):
    command = ("bash", "examples/nodes.sh", number, *torchrun, "examples/train.py", *arguments)
    return started(*command, **how)


def kept(path):
    return torch.load(path, weights_only=True)


def equal(first, second):
    """Whether two checkpoints are the same to the bit: weights, optimizer, everything."""
    return torch.equal(flat(first), flat(second)) and first["history"] == second["history"]


def flat(state):
    moments = [
        s[name] for s in state["optimizer"]["state"].values() for name in ("exp_avg", "step")
    ]
    return torch.cat([t.double().flatten() for t in [*state["model"].values(), *moments]])


def train_on(nprocs, path, *arguments):
    options = train.parse([*arguments, "--checkpoint", str(path)])
    histories = launch(train.train, options, nprocs=nprocs)
    assert all(history == kept(path)["history"] for history in histories)
    return kept(path)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What launch on 1, 2 and 4 ranks arrives at."""
    folder = tmp_path_factory.mktemp("launched")
    return {n: train_on(n, folder / f"{n}.pt", *SHORT) for n in (1, 2, 4)}


def test_training_learns(launched):
    torch.manual_seed(0)
    fresh = train.CharacterModel().state_dict()
    for state in launched.values():
        assert all((state["model"][k] - v).abs().max() > 1e-3 for k, v in fresh.items())
        first, second = state["history"]
        assert second < first


def test_one_process_with_the_whole_batch_differs_by_rounding_only(launched):
    for n in (2, 4):
        assert 0 < (flat(launched[n]) - flat(launched[1])).abs().max() < 1e-12


def test_script_starts_its_own_ranks(launched, tmp_path):
    path = tmp_path / "own.pt"
    process = started(
        sys.executable, "examples/train.py", "--nprocs", 2, *SHORT, "--checkpoint", path
    )
    lines = finished(process).splitlines()
    assert [line.split(":")[0] for line in lines] == ["[rank 0] epoch 1", "[rank 0] epoch 2"]
    assert equal(kept(path), launched[2])


def test_two_nodes_of_two_ranks_arrive_at_the_weights_of_launch_and_leave_nothing_else(
    launched, tmp_path, monkeypatch
):
    path = tmp_path / "nodes.pt"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    finished(nodes(2, *SHORT, "--checkpoint", path))
    assert equal(kept(path), launched[4])
    assert list(tmp_path.glob("torchelastic*")) == list(tmp_path.glob("tmp*")) == []


def test_torchrun_restarts_a_killed_rank_from_the_checkpoint(tmp_path):
    arguments = ("--epochs", "5", "--windows", "512")
    path = tmp_path / "killed.pt"
    process = nodes(1, *arguments, "--checkpoint", path, torchrun=("--max-restarts", "1"))
    assert wait_for(lambda: path.exists() or process.poll() is not None, LIMIT)
    before = ranks_of(process)
    assert len(before) == 2
    before[-1].kill()
    out = finished(process)
    assert not before[0].is_running()
    assert "goes on after epoch" in out
    assert equal(kept(path), train_on(2, tmp_path / "undisturbed.pt", *arguments))


def test_torchrun_arrives_at_the_weights_of_launch_with_a_bar_on_rank_0s_terminal(
    launched, tmp_path
):
    path, (ours, terminal) = tmp_path / "torchrun.pt", pty.openpty()
    process = nodes(1, *SHORT, "--checkpoint", path, stderr=terminal)
    os.close(terminal)
    printed = finished(process).splitlines()
    assert [line.split(":")[0] for line in printed] == ["epoch 1", "epoch 2"]  # from one rank
    assert equal(kept(path), launched[2])
    drawn = os.read(ours, 10_000).decode()
    os.close(ours)
    bars = re.findall(r"\repoch (\d) \[(#+) *\] (\d)/(\d)", drawn)
    lengths = {(epoch, step, of): len(bar) for epoch, bar, step, of in bars}
    assert lengths == {(e, s, "2"): 15 * int(s) for e in "12" for s in "12"}
    assert len(bars) == 4


THREADS = """
import atexit, os, runpy
from pathlib import Path

def threads_of_gloo():
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    print(sum("gloo" in name for name in names), "left")

atexit.register(threads_of_gloo)  # the first to be registered is the last to be called
runpy.run_path("examples/train.py", run_name="__main__")
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux only")
def test_threads_of_the_process_group_end_before_python_does(tmp_path):
    # one that is still busy when Python ends aborts its rank, one time in four on a busy machine
    script = tmp_path / "threads.py"
    script.write_text(THREADS)
    printed = finished(started("bash", "examples/nodes.sh", 1, script, *SHORT))
    assert re.findall(r"\d+ left", printed) == ["0 left", "0 left"]


def test_a_node_that_fails_ends_the_other(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os, time; time.sleep(1000 * (os.environ['GROUP_RANK'] == '0'))\n1/0")
    process = started("bash", "examples/nodes.sh", 2, script)
    try:
        assert process.wait(LIMIT) == 1
    finally:
        process.kill()
        process.output.close()


@pytest.mark.parametrize("how", ["killed", "its input closed"])
def test_nodes_end_with_whoever_started_them(how):
    process = nodes(1, "--epochs", "1000")
    try:
        assert wait_for(lambda: len(ranks_of(process)) == 2, LIMIT)
        children = descendants(process)
        if how == "killed":
            process.kill()
        else:
            process.stdin.close()
        assert wait_for(lambda: not any(child.is_running() for child in children), 10)
    finally:
        process.kill()
        process.wait()
        process.output.close()


# The order of the data, and random numbers.


def what_epochs_see(arguments):
    """For every epoch of a training: the inputs of this rank, and a random number."""
    seen = []

    def train_epoch(model, batches, optimizer):
        seen.append((torch.cat([inputs for inputs, _ in batches]), torch.rand(1).item()))
        return [0.0]

    with patch.object(train, "train_epoch", train_epoch):
        train.train(train.parse(arguments))
    return seen


def rows(inputs):
    return sorted(map(tuple, inputs.tolist()))


def test_each_epoch_has_an_order_of_its_own_and_each_window_goes_to_one_rank():
    windows = train.Windows(train.make_text(seed=0), count=64).inputs
    first, second = launch(what_epochs_see, list(SHORT))
    for (mine, _), (theirs, _) in zip(first, second, strict=True):
        assert rows(torch.cat([mine, theirs])) == rows(windows)
    assert rows(first[0][0]) != rows(first[1][0])


def test_random_numbers_differ_by_rank_and_epoch_and_are_the_same_after_a_restart(tmp_path):
    path = str(tmp_path / "restarted.pt")
    whole = launch(what_epochs_see, [*SHORT])
    launch(what_epochs_see, ["--epochs", "1", *SHORT[2:], "--checkpoint", path])
    rest = launch(what_epochs_see, [*SHORT, "--checkpoint", path])
    numbers = [number for rank in whole for _, number in rank]
    assert len(set(numbers)) == 4
    for (_, (inputs, number)), [(inputs_of_rest, number_of_rest)] in zip(whole, rest, strict=True):
        assert number_of_rest == number
        assert torch.equal(inputs_of_rest, inputs)


# Checkpoints.


def there_and_back(folder):
    """The second epoch with another class than the first, both ways; all on the same ranks."""
    for first, second in (("torch", "ddp_teach"), ("ddp_teach", "torch")):
        for epochs, ddp in (("1", first), ("2", second)):
            rest = ("--windows", "64", "--ddp", ddp, "--checkpoint", f"{folder}/{first}.pt")
            train.train(train.parse(["--epochs", epochs, *rest]))


def test_a_training_goes_on_with_the_other_class(launched, tmp_path):
    launch(there_and_back, str(tmp_path))
    assert equal(kept(tmp_path / "torch.pt"), launched[2])
    assert equal(kept(tmp_path / "ddp_teach.pt"), launched[2])


def exchanged():
    """Whether a wrapper's own state dict loads, strictly, in the other class's wrapper."""
    same = []
    for first, second in ((TorchDDP, DDP), (DDP, TorchDDP)):
        torch.manual_seed(1)
        source = first(train.CharacterModel(width=8))
        torch.manual_seed(2)
        target = second(train.CharacterModel(width=8))
        before = {k: v.clone() for k, v in target.state_dict().items()}
        target.load_state_dict(source.state_dict())
        same += [(list(before) == list(source.state_dict()))]
        for name, value in source.state_dict().items():
            same += [torch.equal(target.state_dict()[name], value)]
            same += [not torch.equal(before[name], value)]
    return same


def test_a_state_dict_of_one_class_loads_in_the_other():
    for same in launch(exchanged):
        assert same == [True] * len(same)


def test_a_broken_off_save_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    path = tmp_path / "state.pt"
    train.save(path, model, optimizer, [1.0])

    def half(state, file):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        train.save(path, model, optimizer, [1.0, 0.5])
    assert kept(path)["history"] == [1.0]


def test_a_checkpoint_in_no_folder_is_refused_before_anything_is_trained(tmp_path, capsys):
    with pytest.raises(SystemExit):
        train.parse(["--checkpoint", str(tmp_path / "missing" / "state.pt")])
    assert "there is no folder" in capsys.readouterr().err


# Evaluation.


def evaluated(count):
    torch.manual_seed(0)
    data = train.Windows(train.make_text(20), count=count)
    return train.evaluate(train.CharacterModel(width=8), data, torch.device("cpu"))


@pytest.mark.parametrize("count", [7, 2])  # with 2, one rank has nothing
def test_every_item_counts_once_on_any_number_of_ranks(count):
    [alone] = launch(evaluated, count, nprocs=1)
    for loss in launch(evaluated, count, nprocs=3):
        assert loss == pytest.approx(alone, rel=1e-14)


# The graphics processor.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here: not run on one")
def test_smoke_on_a_gpu(tmp_path):
    ranks = min(torch.cuda.device_count(), 2)
    state = train_on(ranks, tmp_path / "gpu.pt", *SHORT)
    cpu = launch(on_the_cpu, str(tmp_path / "cpu.pt"), nprocs=1)
    assert cpu == [None]
    assert (flat(state) - flat(kept(tmp_path / "cpu.pt"))).abs().max() < 1e-6


def on_the_cpu(path):
    torch.distributed.destroy_process_group()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    train.train(train.parse([*SHORT, "--checkpoint", path]))
