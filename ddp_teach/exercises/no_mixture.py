"""A gradient that is no weighted sum of anything: what else may have been done with it."""

from collections.abc import Sequence

import torch

from ddp_teach.exercises.mixture import close, expected_gradients
from ddp_teach.exercises.training import Step


def of_values(name: str, steps: Sequence[Step], ranks: Sequence[int], on: str) -> str:
    """The verdict, which goes on after the word "gradients"; ``@`` stands where the iteration may
    be told."""
    got = [steps[rank].after[name] for rank in ranks]
    local = [step.local[name] for step in steps if step.local[name] is not None]
    stacked = torch.stack(local)
    for how, values in (
        ("MAX", stacked.amax(0)),
        ("MIN", stacked.amin(0)),
        ("PRODUCT", stacked.prod(0)),
    ):
        if all(close(gradient, values) for gradient in got):
            return f"were combined by {how} on {on}@. The mean is a SUM, divided by the world size."
    expected = expected_gradients(steps)[name]
    if all(close(gradient, expected.floor()) for gradient in got):
        return f"were rounded down on {on}@: // divides whole numbers, / is meant."
    means = [mean.flatten() for mean in expected_gradients(steps).values() if mean is not None]
    means = torch.cat([mean.to(got[0].dtype) for mean in means])
    if all(torch.isin(gradient, means).all() for gradient in got):
        return (
            f"hold means on {on}@, but those of other places. Take a flat tensor apart in the "
            "order in which it was put together."
        )
    roots = [event.root for event in steps[0].events if event.kind == "reduce"]
    if roots:
        return (
            f"are wrong on {on}@: dist.reduce gives the result to one rank, rank {roots[0]} here; "
            "what the others hold is of no use. all_reduce gives it to all."
        )
    return f"are wrong on {on}@, and no sum of the ranks' gradients either."
