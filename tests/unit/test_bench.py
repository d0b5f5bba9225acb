"""The benchmark: that it runs what it says, and its arithmetic; never how fast it was."""

import copy
import json
from itertools import groupby
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_teach import bench as bench_module
from ddp_teach import stopwatch
from ddp_teach.bench import bench, check, geometric_mean, main, summarise, table
from ddp_teach.launch import LaunchError, launch
from ddp_teach.workloads import WORKLOADS

VARIANTS = {"bare", "torch", "ours"}
MODULE_OF = {
    "bare": "torch.nn.modules.linear",
    "torch": "torch.nn.parallel.distributed",
    "ours": "ddp_teach.ddp",
}

# What is measured.


def test_workloads_are_what_they_are_called():
    assert list(WORKLOADS) == ["linear", "narrow", "mlp", "transformer", "conv"]
    models = {name: make()[0] for name, make in WORKLOADS.items()}
    layers = {
        n: [m for m in model.modules() if not list(m.children())] for n, model in models.items()
    }
    sizes = {n: sum(p.numel() for p in model.parameters()) for n, model in models.items()}
    assert [type(m) for m in layers["linear"]] == [nn.Linear]
    assert [type(m) for m in layers["narrow"]] == [nn.Linear] * 200
    assert round(sizes["mlp"], -6) == 4_000_000
    assert round(sizes["transformer"], -6) == 5_000_000
    assert len(models["transformer"].layers) == 6
    assert sum(isinstance(m, nn.BatchNorm2d) for m in layers["conv"]) == 5


def weights_and_gradients(name):
    """Before the first step, after it, and after the second; and how often SGD was called."""
    model, x = WORKLOADS[name]()
    step, params = stopwatch.step_of(model, x), list(model.parameters())
    seen = [[p.detach().clone() for p in params]]
    sgd = torch.optim.SGD.step
    with patch.object(torch.optim.SGD, "step", autospec=True, side_effect=sgd) as update:
        for _ in range(2):
            step()
            seen.append([(p.detach().clone(), p.grad.clone()) for p in params])
    return *seen, update.call_count


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_does_all_its_work_and_each_the_same(name):
    [(before, first, second, updates)] = launch(weights_and_gradients, name, nprocs=1)
    assert updates == 2
    assert any(grad.abs().max() > 0 for _, grad in first)
    for weight, (weight_1, grad_1), (weight_2, grad_2) in zip(before, first, second, strict=True):
        assert torch.equal(weight, weight_1) and torch.equal(weight, weight_2)
        assert torch.equal(grad_1, grad_2)  # zeroed, not accumulated


def gradients_after_two_steps():
    model, x = WORKLOADS["conv"]()
    grads = {}
    for variant, wrap in stopwatch.VARIANTS.items():
        wrapped = wrap(copy.deepcopy(model))
        step = stopwatch.step_of(wrapped, x)
        step(), step()
        grads[variant] = torch.cat([p.grad.flatten() for p in wrapped.parameters()])
    return grads


def test_bare_is_local_and_ours_does_what_torch_does():
    first, second = launch(gradients_after_two_steps)
    assert set(first) == VARIANTS
    assert not torch.equal(first["bare"], second["bare"])
    for rank in first, second:
        assert not torch.equal(rank["ours"], rank["bare"])
        assert torch.equal(rank["ours"], rank["torch"])
    assert torch.equal(first["ours"], second["ours"])


def log_of_turns(rounds):
    log, make_step, barrier, all_reduce = [], stopwatch.step_of, dist.barrier, dist.all_reduce

    def step_of(model, x):
        step = make_step(model, x)

        def logged():
            log.append(type(model).__module__)
            step()

        return logged

    def logged_all_reduce(tensor, *args, **kwargs):
        if log[-1] in ("barrier", "all_reduce"):  # not one within a step
            log.append("all_reduce")
        return all_reduce(tensor, *args, **kwargs)

    with (
        patch.object(stopwatch, "STEPS", range(3, 3)),
        patch.object(stopwatch, "step_of", step_of),
        patch.object(dist, "barrier", lambda: (log.append("barrier"), barrier())),
        patch.object(dist, "all_reduce", logged_all_reduce),
    ):
        result = stopwatch.measure(["linear"], rounds)["linear"]
    return log, result


def test_variants_take_turns_and_each_round_starts_with_another():
    rounds, order = 5, ["bare", "torch", "ours", "all_reduce"]
    rotation = [order[i % 4 :] + order[: i % 4] for i in range(rounds)]
    for log, result in launch(log_of_turns, rounds):
        turns = log[log.index("barrier") :]
        expected = []
        for variant in sum(rotation, []):
            expected += [("barrier", 1), (MODULE_OF.get(variant, variant), 3)]
        assert [(what, len(list(times))) for what, times in groupby(turns)] == expected
        assert {v: len(t) for v, t in result["seconds"].items()} == dict.fromkeys(order, rounds)
        assert {v: len(t) for v, t in result["forward_overhead"].items()} == dict.fromkeys(
            VARIANTS, rounds
        )
        assert result["steps_per_turn"] == 3
        assert result["parameters"] == 64 * 64 + 64
        assert result["gradient_bytes"] == result["bucket_bytes"] == 4 * result["parameters"]


def test_forward_overhead_is_the_call_less_the_modules_own_forward():
    now = 0.0

    class Module(nn.Module):
        def forward(self, x):
            nonlocal now
            now += 1000
            return x

    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module
            self.costs = [2, 9, 4]

        def forward(self, x):
            nonlocal now
            now += self.costs.pop()
            return self.module(x)

    wrapper = Wrapper(Module())
    with patch.object(stopwatch.time, "perf_counter", lambda: now):
        assert stopwatch.forward_overhead(wrapper, torch.ones(1), calls=3) == 4
        assert stopwatch.forward_overhead(wrapper.module, torch.ones(1), calls=3) == 0
    assert "forward" not in vars(wrapper.module)


# The arithmetic.

RANKS = [
    {
        "seconds": {
            "bare": [1.0, 5.0, 2.0],
            "torch": [4.0, 8.0, 2.0],
            "ours": [2.0, 8.0, 3.0],
            "all_reduce": [1.0, 1.0, 3.0],
        },
        "forward_overhead": {
            "bare": [1.0, 1.0, 1.0],
            "torch": [5.0, 2.0, 9.0],
            "ours": [2.0, 2.0, 2.0],
        },
        "steps_per_turn": 7,
        "parameters": 10,
        "gradient_bytes": 40,
        "bucket_bytes": 36,
    },
    {
        "seconds": {
            "bare": [2.0, 1.0, 1.0],
            "torch": [4.0, 10.0, 4.0],
            "ours": [3.0, 7.0, 1.0],
            "all_reduce": [3.0, 4.0, 1.0],
        },
        "forward_overhead": {
            "bare": [1.0, 1.0, 1.0],
            "torch": [1.0, 3.0, 1.0],
            "ours": [1.0, 4.0, 1.0],
        },
        "steps_per_turn": 7,
        "parameters": 10,
        "gradient_bytes": 40,
        "bucket_bytes": 36,
    },
]
FIGURES = {
    # by round the slower rank: bare 2 5 2, torch 4 10 4, ours 3 8 3, all_reduce 3 4 3
    "seconds": {"bare": 2.0, "torch": 4.0, "ours": 3.0, "all_reduce": 3.0},
    "bound_seconds": 3.0,
    "ours_over_torch": 0.75,  # the middle one of 3/4, 8/10, 3/4
    "forward_overhead_seconds": {"torch": 4.0, "ours": 1.0},  # torch 5 3 9, ours 2 4 2, less 1
    "forward_overhead_ratio": 0.25,
    "steps_per_turn": 7,
    "parameters": 10,
    "gradient_bytes": 40,
    "bucket_bytes": 36,
}


def test_figures_of_a_workload():
    assert summarise(RANKS) == FIGURES


def test_the_ratio_is_the_median_of_ratios_not_the_ratio_of_medians():
    times = {"bare": [1.0] * 3, "all_reduce": [1.0] * 3}
    times |= {"torch": [1.0, 2.0, 4.0], "ours": [2.0, 1.0, 4.0]}
    rank = RANKS[0] | {"seconds": times | {"ours": [2.0, 3.0, 4.0]}}
    assert summarise([rank])["ours_over_torch"] == 1.5  # of 2, 1.5, 1
    rank = RANKS[0] | {"seconds": times | {"ours": [3.0, 2.0, 2.0]}}
    assert summarise([rank])["ours_over_torch"] == 1.0  # of 3, 1, 0.5; medians: 2 and 2
    rank = RANKS[0] | {"seconds": times | {"ours": [1.0, 5.0, 1.0]}}
    assert summarise([rank])["ours_over_torch"] == 1.0  # of 1, 2.5, 0.25; medians: 1 and 2


def test_geometric_mean():
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([1.0, 8.0, 1.0]) == pytest.approx(2.0)


def test_ranks_figures_reach_the_result():
    slow = RANKS[0] | {"seconds": RANKS[0]["seconds"] | {"ours": [12.0, 24.0, 6.0]}}  # 3 x torch
    with patch.object(
        bench_module, "launch", return_value=[{"conv": slow, "mlp": RANKS[0]}]
    ) as run:
        result = bench(["conv", "mlp", "conv"], rounds=3, nprocs=1)
    assert run.call_args.args == (stopwatch.measure, ["conv", "mlp"], 3, False)
    assert run.call_args.kwargs["nprocs"] == 1
    assert run.call_args.kwargs["timeout"] >= 2 * 3 * 4 * stopwatch.TURN_SECONDS * 10
    assert list(result["workloads"]) == ["conv", "mlp"]
    ratios = [figures["ours_over_torch"] for figures in result["workloads"].values()]
    assert ratios == [3.0, 1.0]
    assert result["ours_over_torch"] == pytest.approx(3**0.5)


# What comes out.

RESULT = {
    "torch_version": "2.x",
    "nprocs": 2,
    "rounds": 3,
    "workloads": {
        "mlp": FIGURES | {"parameters": 4_173_800, "gradient_bytes": 16_695_200},
        "conv": FIGURES
        | {
            "seconds": {"bare": 0.0125, "torch": 0.016, "ours": 0.0151, "all_reduce": 0.0004},
            "bound_seconds": 0.0125,
            "ours_over_torch": 0.9436,
            "forward_overhead_seconds": {"torch": 30e-6, "ours": 1.25e-6},
            "forward_overhead_ratio": 0.0417,
        },
    },
    "ours_over_torch": 0.8413,
}


def test_table():
    lines = table(RESULT).splitlines()
    assert lines[0] == "Ranks: 2, one thread each. Rounds: 3. torch 2.x."
    rows = [" ".join(line.split()) for line in lines]
    assert "workload parameters bare all-reduce bound torch ours ours/torch" in rows
    assert "mlp 4,173,800 2000.000 3000.000 3000.000 4000.000 3000.000 0.750" in rows
    assert "conv 10 12.500 0.400 12.500 16.000 15.100 0.944" in rows
    assert "geometric mean 0.841" in rows
    assert "workload torch ours ours/torch gradients buckets" in rows
    assert "mlp 4000000.0 1000000.0 0.250 16,695,200 36" in rows
    assert "conv 30.0 1.2 0.042 40 36" in rows
    blocks = [list(block) for filled, block in groupby(lines, key=bool) if filled][1:]
    for _title, *block in blocks:
        assert len({len(line) for line in block}) == 1  # the columns stand below each other
    assert [len(block) for block in blocks] == [5, 4]


LADDER = ["ForwardOnly", "SameStart", "AverageAfterBackward", "OverlappedHooks", "Buckets"]


def test_table_of_the_ladder():
    steps = {name: 1.5 + i for i, name in enumerate(LADDER)}
    mlp = FIGURES | {"seconds": FIGURES["seconds"] | steps}
    with_ladder = RESULT | {"workloads": {"mlp": mlp, "conv": mlp}}
    lines = table(with_ladder).splitlines()
    at = lines.index("Milliseconds per step, up the ladder")
    assert [line.split() for line in lines[at + 1 :]] == [
        ["wrapper", "mlp", "conv"],
        ["bare", "2000.000", "2000.000"],
        *([name, f"{i}500.000", f"{i}500.000"] for i, name in enumerate(LADDER, 1)),
        ["torch", "4000.000", "4000.000"],
        ["ours", "3000.000", "3000.000"],
    ]
    assert "up the ladder" not in table(RESULT)


def gradients_up_the_ladder():
    """The first gradient that every variant's step leaves."""
    model, x = WORKLOADS["linear"]()
    found = {}
    for name, wrap in stopwatch.WRAPPERS.items():
        wrapped = wrap(copy.deepcopy(model))
        stopwatch.step_of(wrapped, x)()
        found[name] = next(wrapped.parameters()).grad
    return found


def test_every_step_of_the_ladder_does_its_own_work():
    first, second = launch(gradients_up_the_ladder)
    for name in LADDER:
        averages = name in LADDER[2:]
        assert torch.equal(first[name], second[name]) == averages
        assert torch.equal(first[name], first["torch"]) == averages


def test_ladder_is_measured_on_request(capsys):
    main(["--json", "--rounds", "1", "--workload", "linear", "--ladder"])
    seconds = json.loads(capsys.readouterr().out)["workloads"]["linear"]["seconds"]
    assert set(seconds) == VARIANTS | {"all_reduce"} | set(LADDER)
    assert all(s > 0 for s in seconds.values())


def kinds_in(value):
    """The types of a JSON value's parts, for comparison."""
    if isinstance(value, dict):
        return {name: kinds_in(part) for name, part in value.items()}
    return type(value)


def test_json_has_the_documented_form(capsys):
    main(["--json", "--rounds", "2", "--workload", "linear"])
    out = capsys.readouterr().out
    result = json.loads(out)
    documented = RESULT | {"workloads": {"linear": FIGURES}}
    assert kinds_in(result) == kinds_in(documented)
    assert (result["rounds"], result["nprocs"]) == (2, 2)
    assert result["torch_version"] == torch.__version__
    figures = result["workloads"]["linear"]
    assert all(seconds > 0 for seconds in figures["seconds"].values())
    assert figures["parameters"] == 64 * 64 + 64
    assert figures["steps_per_turn"] in range(3, 201)
    assert figures["bound_seconds"] == max(figures["seconds"][v] for v in ("bare", "all_reduce"))


def test_what_ranks_print_is_kept_out_of_the_output(capsys):
    def noisy(*_, ladder):
        print("[rank 0] something")
        return RESULT

    with patch.object(bench_module, "bench", noisy):
        main(["--json"])
        told = capsys.readouterr()
        assert json.loads(told.out) == RESULT
        assert told.err == "[rank 0] something\n"
        main([])
    assert capsys.readouterr().out == table(RESULT) + "\n"


def test_a_failed_launch_is_told_without_a_traceback():
    with (
        patch.object(bench_module, "launch", side_effect=LaunchError("rank 1 was killed")),
        pytest.raises(SystemExit, match="^rank 1 was killed$"),
    ):
        main([])


ROUNDS = "rounds must be a whole number from 1 to 1000, got "
NPROCS = "nprocs must be a whole number from 1 to 256, got "
NAMES = "workloads must be a list with some of linear, narrow, mlp, transformer, conv, got "


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"rounds": 0}, ValueError, ROUNDS + "0 (int)"),
        ({"rounds": -9}, ValueError, ROUNDS + "-9 (int)"),
        ({"rounds": 1001}, ValueError, ROUNDS + "1001 (int)"),
        ({"rounds": 2.5}, TypeError, ROUNDS + "2.5 (float)"),
        ({"rounds": True}, TypeError, ROUNDS + "True (bool)"),
        ({"rounds": None}, TypeError, ROUNDS + "None"),
        ({"nprocs": 0}, ValueError, NPROCS + "0 (int)"),
        ({"nprocs": 257}, ValueError, NPROCS + "257 (int)"),
        ({"nprocs": "2"}, TypeError, NPROCS + "'2' (str)"),
        ({"workloads": ["mlp", "resnet"]}, ValueError, NAMES + "'resnet' (str) in it"),
        ({"workloads": [3]}, ValueError, NAMES + "3 (int) in it"),
        ({"workloads": []}, ValueError, NAMES + "an empty one"),
        ({"workloads": "mlp"}, TypeError, NAMES + "'mlp' (str)"),
        ({"workloads": None}, TypeError, NAMES + "None"),
    ],
)
def test_bad_arguments(arguments, error, told):
    with pytest.raises(error) as caught:
        bench(**arguments)
    assert str(caught.value) == "bench: " + told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rounds", "many"], ROUNDS + "'many' (str)"),
        (["--rounds", "0"], ROUNDS + "0 (int)"),
        (["--nprocs", "1.5"], NPROCS + "'1.5' (str)"),
        (["--workload", "mlp", "--workload", "x"], NAMES + "'x' (str) in it"),
        (["--round", "3"], "unrecognized arguments: --round 3"),
        (["--rounds"], "argument --rounds: expected one argument"),
    ],
)
def test_bad_options(arguments, told, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"ddp_teach.bench: {told}\n"


def test_each_workload_is_run_once():
    assert check(iter(["conv", "linear", "conv"]), 9, 2) == ["conv", "linear"]
