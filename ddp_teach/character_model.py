"""A small model that writes text character by character, and the training that chapter 10 and the
cluster chapter share. It is ordinary PyTorch: nothing here knows whether the model is wrapped.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_teach.text import ALPHABET, decode, encode


class CharacterModel(nn.Module):
    """Says for every character of a text which one may follow: an embedding, a recurrent layer that
    remembers what it has read, and a linear layer.

    Takes ids ``[batch, length]``, int64, and returns logits ``[batch, length, 29]``, one for each
    character of the alphabet. Its parameters are float64, so that different processors, which round
    differently, still print the same digits.
    """

    def __init__(self, width: int = 48):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), width // 2)
        self.memory = nn.GRU(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, len(ALPHABET))
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.memory(self.embedding(ids))[0])


def make_loader(
    data: Dataset, global_batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0
) -> DataLoader:
    """The batches of one rank: every world size sees the same global batches, each rank its share.

    Call ``loader.sampler.set_epoch(epoch)`` before every epoch, or all have the same order. Raises
    ``ValueError`` where the ranks can't have equal shares.
    """
    for what, n in (("global_batch_size", global_batch_size), ("len(data)", len(data))):
        if n % world_size:
            raise ValueError(f"{what} is {n}, which {world_size} ranks can't share equally.")
    sampler = DistributedSampler(data, world_size, rank, shuffle=True, seed=seed)
    return DataLoader(data, global_batch_size // world_size, sampler=sampler)


def train_epoch(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], optimizer: Optimizer
) -> list[float]:
    """One optimizer step for every batch; returns the losses of this rank, one a step, in nats."""
    device = next(model.parameters()).device
    losses = []
    for inputs, targets in batches:
        loss = mean_loss(model, inputs.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over all characters of a batch: of equal shares the mean is the
    mean of the whole."""
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: nn.Module, length: int, seed: int = 0, temperature: float = 0.5) -> str:
    """``length`` characters as ``model``, not wrapped, goes on after the end of a line.

    Low temperatures choose likely characters, high ones surprise.
    """
    device = next(model.parameters()).device
    draw, ids = torch.Generator().manual_seed(seed), encode("\n")
    while len(ids) <= length:
        logits = model(ids[None].to(device))[0, -1].cpu()
        chances = (logits / temperature).softmax(dim=0)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=draw)])
    return decode(ids[1:])
