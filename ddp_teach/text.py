"""A small made-up text, and the windows of it that a character model learns from.

Nothing is downloaded: a grammar of four lists makes as many sentences as are asked for. It is easy
to learn, so that a model of a few seconds writes words and sentences.
"""

import random

import torch
from torch import Tensor
from torch.utils.data import Dataset

WHO = (
    *("the cat", "the old dog", "a small bird", "the red fox"),
    *("my friend", "the sailor", "a tired child", "the black horse"),
)
DOES = ("sees", "follows", "likes", "looks for", "waits for", "sings to", "hides from", "dreams of")
WHOM = (
    *("the sea", "a warm fire", "the moon", "an old tree"),
    *("the garden", "a piece of bread", "the long road", "the rain"),
)
WHEN = ("", " in the morning", " at night", " every day", " when it snows")

ALPHABET = "\n .abcdefghijklmnopqrstuvwxyz"


def make_text(sentences: int = 500, seed: int = 0) -> str:
    """So many sentences, each on a line of its own; the same for the same ``seed``."""
    draw = random.Random(seed).choice
    lines = (f"{draw(WHO)} {draw(DOES)} {draw(WHOM)}{draw(WHEN)}.\n" for _ in range(sentences))
    return "".join(lines)


def encode(text: str) -> Tensor:
    """The places of the characters in ``ALPHABET``: shape ``[len(text)]``, int64.

    Raises ``ValueError`` for a character that is not in it.
    """
    if unknown := sorted(set(text) - set(ALPHABET)):
        raise ValueError(f"The alphabet has no {', '.join(map(repr, unknown))}.")
    return torch.tensor([ALPHABET.index(character) for character in text], dtype=torch.int64)


def decode(ids: Tensor) -> str:
    """The text for the numbers that ``encode`` gave."""
    return "".join(ALPHABET[i] for i in ids.tolist())


class Windows(Dataset):
    """``text`` cut into windows of ``length`` characters. Item i is a pair (inputs, targets), both
    ``[length]``, int64; the target of a character is the one that follows it.

    ``count`` takes the first so many windows: choose a number that every world size divides, or
    ``DistributedSampler`` gives some windows to two ranks to make it even.
    """

    def __init__(self, text: str, length: int = 32, count: int | None = None):
        ids = encode(text)
        available = (len(ids) - 1) // length
        if count is None:
            count = available
        if not 1 <= count <= available:
            raise ValueError(
                f"The text has {available} windows of {length} characters, but {count} were asked "
                "for. Make the text longer, or the windows shorter."
            )
        self.inputs = ids[: count * length].view(count, length)
        self.targets = ids[1 : count * length + 1].view(count, length)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.inputs[i], self.targets[i]
