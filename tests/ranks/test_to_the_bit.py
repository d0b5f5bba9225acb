"""Training with our class gives the same parameters and buffers as with torch's, to the last bit.

Hypothesis draws the model, the wrapper's arguments and the way of training. Several drawn cases run
in one launch; when one fails, hypothesis prints the smallest that does, ready to be run alone.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddp_teach import DistributedDataParallel, launch

STEPS = 4
CASES_A_LAUNCH = 5


class Branching(nn.Module):
    """Uses one of two layers in turn, the other not at all."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 9), nn.Linear(9, 2)
        self.turns = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(self.turns[self.calls % 2](self.first(x)))


class MixedDtypes(nn.Module):
    """float32, float64 and bfloat16 in turn, and a frozen float16."""

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(7, 11), nn.Linear(11, 3)
        self.b = nn.Linear(11, 11, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float16), requires_grad=False)

    def forward(self, x):
        return self.c(self.b(self.a(x).double()).float()) * self.scale + self.frozen


class Tied(nn.Module):
    """The same weight twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def mlp(depth: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(120, 120), nn.Tanh())]
    return nn.Sequential(nn.Linear(7, 120), *layers, nn.Linear(120, 3))


def convolution() -> nn.Module:
    block = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*block, nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 5))


def frozen_first() -> nn.Module:
    model = mlp(1)
    return model.requires_grad_(False)[-1].requires_grad_(True) and model


MODELS = {  # name: how to make it, and the shape of one rank's batch
    "mlp of depth 0": (lambda: mlp(0), (5, 7)),
    "mlp of depth 3": (lambda: mlp(3), (5, 7)),
    "mlp, all but the last layer frozen": (frozen_first, (5, 7)),
    "large layer": (lambda: nn.Linear(400, 300), (3, 400)),
    "convolution": (convolution, (4, 3, 8, 8)),
    "channels_last": (lambda: convolution().to(memory_format=torch.channels_last), (4, 3, 8, 8)),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0),
        (2, 5, 16),
    ),
    "tied": (Tied, (5, 7)),
    "branching": (Branching, (5, 7)),
    "mixed dtypes": (MixedDtypes, (5, 7)),
}

CASE = st.fixed_dictionaries(
    {
        "model": st.sampled_from(sorted(MODELS)),
        "seed": st.integers(0, 1000),
        "bucket_cap_mb": st.sampled_from([None, 1e-5, 1e-3, 0.05, 1]),
        "gradient_as_bucket_view": st.booleans(),
        "batched_grad_copy": st.booleans(),
        "find_unused_parameters": st.booleans(),
        "static_graph": st.booleans(),
        "accumulate": st.booleans(),
        "set_to_none": st.booleans(),
        "adam": st.booleans(),
    }
).filter(lambda case: torch_can(**case))


def torch_can(model, find_unused_parameters, static_graph, accumulate, **others) -> bool:
    """False where torch's class has nothing to compare with: it wants unused parameters announced,
    a static graph that stays the same, and aborts if a static graph's first backward is local."""
    if static_graph and (accumulate or find_unused_parameters):
        return False
    return model != "branching" or (find_unused_parameters and not static_graph)


def train(wrapper: type, case: dict) -> dict[str, torch.Tensor]:
    """On a rank: the state after four steps, each rank with data of its own."""
    arguments = "bucket_cap_mb gradient_as_bucket_view batched_grad_copy find_unused_parameters"
    names = [*arguments.split(), "static_graph"]
    torch.manual_seed(case["seed"])
    make, shape = MODELS[case["model"]]
    model = wrapper(make(), **{name: case[name] for name in names})
    rule = torch.optim.Adam if case["adam"] else torch.optim.SGD
    optimizer = rule([p for p in model.parameters() if p.requires_grad], lr=0.01)
    data = torch.Generator().manual_seed(1000 * case["seed"] + dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=case["set_to_none"])
        if case["accumulate"]:
            with model.no_sync():
                model(torch.randn(shape, generator=data)).square().sum().backward()
        model(torch.randn(shape, generator=data)).square().sum().backward()
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def differences(cases: list[dict]) -> list[list[str]]:
    """On a rank: for every case the names of the tensors that are not the same to the bit."""
    found = []
    for case in cases:
        ours, torchs = train(DistributedDataParallel, case), train(TorchDDP, case)
        assert ours.keys() == torchs.keys()
        found.append([name for name in ours if not torch.equal(ours[name], torchs[name])])
    return found


def check(world_size: int, cases: list[dict]) -> None:
    found = launch(differences, cases, nprocs=world_size, timeout=100.0)
    assert found == [[[] for _ in cases]] * world_size


DRAWN = given(
    world_size=st.sampled_from([2, 3, 4]),
    cases=st.lists(CASE, min_size=CASES_A_LAUNCH, max_size=CASES_A_LAUNCH),
)
USUAL = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=8, derandomize=True, **USUAL)
@DRAWN
def test_forty_cases_that_are_always_the_same(world_size, cases):
    check(world_size, cases)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=60, **USUAL)
@DRAWN
def test_three_hundred_cases(world_size, cases):
    check(world_size, cases)


def test_a_difference_in_the_last_bit_is_found():
    case = {"model": "mlp of depth 0", "seed": 1, "bucket_cap_mb": None, "adam": False}
    flags = "gradient_as_bucket_view batched_grad_copy find_unused_parameters static_graph"
    case |= dict.fromkeys([*flags.split(), "accumulate", "set_to_none"], False)
    assert launch(differences_of_a_last_bit, case) == [["0.weight"]] * 2


def differences_of_a_last_bit(case):
    ours, torchs = train(DistributedDataParallel, case), train(TorchDDP, case)
    weight = ours["module.0.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(2.0))
    names = [name for name in ours if not torch.equal(ours[name], torchs[name])]
    return [name.removeprefix("module.") for name in names]
