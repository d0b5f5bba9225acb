"""The model and the training that chapters share: every world size sees the same global batches."""

import math

import pytest
import torch
from torch import nn

from ddp_teach.character_model import CharacterModel, make_loader, mean_loss, train_epoch, write
from ddp_teach.text import ALPHABET, Windows, encode, make_text


@pytest.fixture(scope="module")
def data():
    return Windows(make_text(100), length=16, count=64)


def small_model(seed=0):
    torch.manual_seed(seed)
    return CharacterModel(width=16)


def test_logits_for_every_character_in_float64(data):
    model = small_model()
    inputs, _ = data[0]
    logits = model(inputs[None])
    assert logits.shape == (1, 16, len(ALPHABET))
    assert {p.dtype for p in model.parameters()} == {logits.dtype} == {torch.float64}


def test_a_character_is_guessed_from_those_before_it_only(data):
    model, inputs = small_model(), data[0][0].clone()
    before = model(inputs[None])
    inputs[8] = (inputs[8] + 1) % len(ALPHABET)
    after = model(inputs[None])
    assert torch.equal(before[0, :8], after[0, :8])
    assert not torch.equal(before[0, 8:], after[0, 8:])


def rows(batches):
    return [sorted(map(tuple, inputs.tolist())) for inputs, _ in batches]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_shares_of_the_ranks_make_up_the_same_global_batches(data, world_size):
    loaders = [make_loader(data, 8, rank, world_size) for rank in range(world_size)]
    alone = make_loader(data, 8)
    orders = []
    for epoch in (0, 1):
        for loader in [*loaders, alone]:
            loader.sampler.set_epoch(epoch)
        shares = zip(*map(rows, loaders), strict=True)
        orders.append(rows(alone))
        assert [sorted(sum(share, [])) for share in shares] == orders[-1]
    assert len(orders[0]) == 8
    assert orders[0] != orders[1], "another order in every epoch"


@pytest.mark.parametrize(
    ("batch", "world_size", "message"), [(8, 3, "global_batch_size is 8"), (9, 3, "is 64")]
)
def test_shares_that_are_not_equal_are_refused(data, batch, world_size, message):
    with pytest.raises(ValueError, match=f"{message}, which 3 ranks can't share equally"):
        make_loader(data, batch, 0, world_size)


def test_the_mean_over_equal_shares_is_the_mean_of_the_whole(data):
    model = small_model()
    inputs, targets = torch.stack([data[i][0] for i in range(8)]), data.targets[:8]
    whole = mean_loss(model, inputs, targets)
    halves = [mean_loss(model, inputs[half], targets[half]) for half in (slice(4), slice(4, 8))]
    assert whole.item() == pytest.approx(sum(halves).item() / 2, rel=1e-12)


def test_an_epoch_takes_one_step_a_batch_and_the_model_learns(data):
    model, loader = small_model(), make_loader(data, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = [loss for _ in range(4) for loss in train_epoch(model, loader, optimizer)]
    assert len(losses) == 4 * 8
    assert losses[0] == pytest.approx(math.log(len(ALPHABET)), rel=0.1), "it knew nothing"
    assert losses[-1] < 0.7 * losses[0]


def test_the_first_loss_is_that_of_the_first_batch_before_the_step(data):
    model, loader = small_model(), make_loader(data, 8)
    inputs, targets = next(iter(loader))
    expected = mean_loss(model, inputs, targets).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert train_epoch(model, loader, optimizer)[0] == expected


class AlwaysNext(nn.Module):
    """The next character in the alphabet is the only likely one."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, ids):
        return nn.functional.one_hot((ids + 1) % len(ALPHABET), len(ALPHABET)) * 1000.0


def test_write_goes_on_with_the_character_it_has_drawn():
    assert write(AlwaysNext(), 5) == ALPHABET[1:6]


def test_write_is_the_same_for_the_same_seed():
    model = small_model()
    text = write(model, 40)
    assert len(text) == 40 == len(encode(text))
    assert write(model, 40) == text != write(model, 40, seed=1)
    assert write(model, 40, temperature=1e-4) == write(model, 40, seed=1, temperature=1e-4)
