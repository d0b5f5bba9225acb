"""A gradient that is the mean times something: what it was divided by, in words."""

import math


def ratio_text(ratio: float, size: int, on: str) -> str:
    """For a gradient that is ``ratio`` times the mean over ``size`` ranks. The text goes on after
    the word "gradients"; ``@`` stands where the iteration may be told."""
    if ratio == 0:
        return f"are all zero on {on}@."
    if ratio < 0:
        return f"have the wrong sign on {on}@: {ratio:g} times the mean."
    what = (
        f"are {ratio:.1f} times too large" if ratio > 1 else f"are {1 / ratio:.1f} times too small"
    )
    return f"{what} on {on}@: {why(ratio, size)}"


def why(ratio: float, size: int) -> str:
    """What makes a gradient so large or so small."""
    divisor = size / ratio
    if near(ratio, size):
        return "summed, not averaged. Divide by the world size."
    if near(ratio, size * size):
        return "summed twice, and never divided by the world size."
    if near(divisor, 4) and size == 2:
        return "the sum was divided by 4, so divided by the world size twice, or by a fixed number."
    if near(divisor, size * size):
        return f"divided by the world size twice, by {size} and by {size} again."
    times = round(math.log(divisor, size)) if divisor > 1 else 0
    if times > 2 and near(divisor, size**times):
        return (
            f"the sum was divided by {size**times}, so by the world size {times} times, once for "
            "every parameter perhaps, or by a number that has nothing to do with the ranks."
        )
    if near(divisor, round(divisor)) and divisor < 100:
        return (
            f"the sum was divided by {round(divisor)}, but there are {size} ranks. "
            "dist.get_world_size() tells how many."
        )
    return (
        f"the sum was divided by {divisor:.3g}, but there are {size} ranks. Does something else "
        "scale gradients, a batch size or clipping?"
    )


def near(a: float, b: float) -> bool:
    return abs(a - b) < 0.02 * abs(b)
