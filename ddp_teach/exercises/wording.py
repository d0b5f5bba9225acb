"""Numbers and names as a report shows them."""

from collections.abc import Sequence

from torch import Tensor

from ddp_teach.exercises.mixture import high

MOST_NAMES = 3


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def first_difference(expected: Tensor | None, got: Sequence[Tensor | None]) -> tuple[int, ...]:
    """The first place at which a rank's tensor is clearly not the expected one."""
    if expected is None or not expected.numel():
        return ()
    for tensor in got:
        if tensor is not None and tensor.shape == expected.shape:
            off = (tensor.to(high(tensor)) - expected.to(high(expected))).abs()
            if off.max() > 0:
                return tuple((off > off.max() / 50).nonzero()[0].tolist())
    return (0,) * expected.dim()


def number_texts(
    expected: Tensor | None, got: Sequence[Tensor | None], place: tuple[int, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """One number, as expected and as every rank got it: four digits, or as many as tell them
    apart."""
    for digits in (4, 9):
        wanted = number_text(expected, place, digits)
        texts = tuple(number_text(tensor, place, digits) for tensor in got)
        if set(texts) != {wanted}:
            break
    return (wanted,) * len(texts), texts


def number_text(tensor: Tensor | None, place: tuple[int, ...], digits: int) -> str:
    if tensor is None:
        return "None"
    if tensor.dim() != len(place) or not tensor.numel():
        return f"shape {list(tensor.shape)}"
    return f"{tensor[place].item():.{digits}g}"


def sentence(hint: str, **ranks: str) -> str:
    """The hint filled in, with a capital letter."""
    text = hint.format(**ranks)
    return text[0].upper() + text[1:]
