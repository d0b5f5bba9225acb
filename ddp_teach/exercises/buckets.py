"""Step buckets: few large all-reduces instead of one for every parameter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.distributed as dist

from ddp_teach.exercises import models
from ddp_teach.exercises.average import DTYPES, FROZEN, TIED, trained
from ddp_teach.exercises.collectives import Event
from ddp_teach.exercises.overlap import SMALL
from ddp_teach.exercises.probe import Finding, Learner, Probe
from ddp_teach.exercises.training import squares

CAP = 400  # bytes; ``models.layers`` has three layers of 256 + 32
TWO_FIT = "gradients travel in two buckets"
UNIT = "The cap is in MiB: 1 MiB is 2**20 bytes."
NEVER_FULL = f"{FROZEN} A bucket that waits for it never fills."
MIXED = f"{DTYPES} A bucket holds parameters of one dtype."


@dataclass
class Sent:
    """What one rank sent in the last of a few iterations, by ``bucket_cap_mb`` in bytes; ``None``
    is the default. ``sizes``: bytes and number of every parameter that learns."""

    takes_cap: bool
    sizes: list[int]
    by_cap: dict[int | None, list[Event]]


def send_gradients(learner: Learner, iterations: int = 3) -> Sent:
    """A few iterations with three caps."""
    sizes = [p.numel() * p.element_size() for p in models.layers().parameters()]
    if not learner.accepts("bucket_cap_mb"):
        return Sent(False, sizes, {})
    by_cap = {}
    for cap in (None, CAP, 1):
        wrapper = learner.wrap(models.layers(), **({"bucket_cap_mb": cap / 2**20} if cap else {}))
        for iteration in range(iterations):
            loss = squares(wrapper(models.data(dist.get_rank(), iteration)))
            learner.events.clear()
            learner.doing(f"the backward pass of iteration {iteration + 1}")
            loss.backward()
            wrapper.zero_grad()
        by_cap[cap] = [event for event in learner.events if event.collective]
    return Sent(True, sizes, by_cap)


def judge_sizes(evidence: Sequence[Sent]) -> Iterator[Finding]:
    """Fewer collectives than parameters, in buckets of about the size of the cap."""
    sent = evidence[0]
    if not sent.takes_cap:
        yield Finding(
            "The constructor does not take bucket_cap_mb. From this step on it does: "
            "def __init__(self, module, bucket_cap_mb=25)."
        )
    elif not all(sent.by_cap.values()):
        return  # a thread of the learner's own sends
    elif len(buckets(sent, None)) >= (params := len(sent.sizes)):
        yield Finding(
            f"There are {len(buckets(sent, None))} collectives for {params} parameters: every "
            "gradient travels alone. Put the gradients of a bucket into one flat tensor and "
            f"all-reduce that. {UNIT}",
            f"collectives in one backward pass, for {params} parameters",
            tuple(f"fewer than {params}" for _ in evidence),
            tuple(str(len(seen.by_cap[None])) for seen in evidence),
        )
    else:
        yield from judge_cap(evidence)


def judge_cap(evidence: Sequence[Sent]) -> Iterator[Finding]:
    """Whether the buckets are neither much larger nor much smaller than the cap."""
    sent = evidence[0]
    one = max(sent.sizes)
    # the parameter that makes a bucket full may still be part of it, as in torch
    for cap, limit in ((CAP, CAP + one), (1, one + min(sent.sizes) - 1)):
        if max(buckets(sent, cap)) > limit:
            yield Finding(
                f"With a cap of {cap} bytes (bucket_cap_mb={cap}/2**20) there is a bucket of "
                f"{max(buckets(sent, cap))} bytes, though no parameter has more than {one}. "
                f"{cause(sent)}",
                f"largest bucket, in bytes, for a cap of {cap}",
                tuple(f"{max(cap, one)}, or little more" for _ in evidence),
                tuple(str(max(buckets(seen, cap))) for seen in evidence),
            )
            return
    if any(sum(two) <= CAP for two in pairwise(buckets(sent, CAP))):
        alone = len(buckets(sent, CAP)) >= len(sent.sizes)
        yield Finding(
            f"With a cap of {CAP} bytes {'every gradient travels alone' if alone else TWO_FIT}, "
            "though two would fit into a bucket. Fill it until the next gradient would make it too "
            f"large; then begin the next one, counting from 0. {UNIT}"
        )


def buckets(sent: Sent, cap: int | None) -> list[int]:
    """How many bytes each bucket had, in their order. Some wrappers start several collectives for
    each: those of the kind that carries most tell its size."""
    kinds: dict[str, list[int]] = {}
    for event in sent.by_cap[cap]:
        kinds.setdefault(event.kind, []).append(event.nbytes)
    return max(kinds.values(), key=sum)


def cause(sent: Sent) -> str:
    """Why a bucket may be too large."""
    if len(sent.by_cap[CAP]) == len(sent.by_cap[None]) == len(sent.by_cap[1]):
        return f"bucket_cap_mb has no effect. {UNIT}"
    if max(sum(numel for numel, _ in event.tensors) for event in sent.by_cap[CAP]) <= CAP:
        return "The cap counts bytes, not elements: numel() * element_size()."
    return UNIT


PROBES = [
    Probe(
        "three layers, counting what is sent for several bucket_cap_mb", send_gradients, judge_sizes
    ),
    trained("three layers in small buckets", models.layers, **SMALL),
    trained("tied weights in small buckets", models.Tied, advice=TIED, **SMALL),
    trained("a frozen layer, in small buckets", models.Frozen, advice=NEVER_FULL, **SMALL),
    trained("several dtypes, in small buckets", models.Dtypes, advice=MIXED, **SMALL),
    trained("buckets of one parameter", models.Buffers, bucket_cap_mb=1 / 2**20),
    trained("a(b(x)) on rank 0, b(a(x)) elsewhere", models.EitherWay, bucket_cap_mb=1 / 2**20),
]
