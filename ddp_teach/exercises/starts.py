"""What a rank saw of step same_start, and what it tells about the mistake."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_teach.exercises.collectives import Event, not_waited_for
from ddp_teach.exercises.mixture import close, high
from ddp_teach.exercises.probe import Finding, ranks_text, same
from ddp_teach.exercises.wording import first_difference, number_texts, some

KEEP = "Copy rank 0's values into the tensors that are there: dist.broadcast(tensor, 0) does that."


@dataclass
class Start:
    """What one rank saw: all tensors by name, and what kind each is."""

    kinds: dict[str, str]  # "parameter", "frozen parameter" or "buffer"
    before: dict[str, Tensor]  # before wrapping
    after: dict[str, Tensor]
    after_forward: dict[str, Tensor]  # parameters only
    replaced: list[str]  # parameters that are other objects now
    switched: list[str]  # parameters whose requires_grad is another one now
    events: list[Event]


def compare_starts(evidence: Sequence[Start]) -> Iterator[Finding]:
    """One finding for every kind of mistake."""
    if touched := parameters_touched(evidence):
        yield Finding(touched)
        return
    first = evidence[0]
    verdicts: dict[str, list[str]] = {}
    for name in first.kinds:
        if not all(same(seen.after[name], first.before[name]) for seen in evidence):
            verdicts.setdefault(verdict(name, evidence), []).append(name)
    for text, names in verdicts.items():
        got = [seen.after[names[0]] for seen in evidence]
        place = first_difference(first.before[names[0]], got)
        yield Finding(
            f"{subject(names, evidence)} {text}",
            f"{names[0]}{list(place) or ''} after wrapping",
            *number_texts(first.before[names[0]], got, place),
        )
    if not verdicts and not_waited_for(evidence[1].events):
        yield Finding(
            "A tensor was sent, but not waited for. This time it was there, by luck: call wait() "
            "on each before __init__ returns."
        )


def parameters_touched(evidence: Sequence[Start]) -> str:
    """Whether the parameters are still the ones that were there; empty if so."""
    if replaced := sorted({name for seen in evidence for name in seen.replaced}):
        return (
            f"{some(replaced)}: wrapping has put another parameter in place of the one that was "
            f"there. Tied weights and optimizers lose it. {KEEP}"
        )
    if switched := sorted({name for seen in evidence for name in seen.switched}):
        return f"{some(switched)}: wrapping has changed requires_grad. Leave it as it is."
    return ""


def subject(names: Sequence[str], evidence: Sequence[Start]) -> str:
    """The names as a group, if they are all of it that started differently: "buffers"."""
    kinds, before = evidence[0].kinds, evidence[0].before
    differ = {n for n in kinds if not all(same(seen.before[n], before[n]) for seen in evidence)}
    groups = {
        "parameters and buffers": ("parameter", "frozen parameter", "buffer"),
        "parameters": ("parameter", "frozen parameter"),
        "parameters that learn": ("parameter",),
        "frozen parameters": ("frozen parameter",),
        "buffers": ("buffer",),
        "frozen parameters and buffers": ("frozen parameter", "buffer"),
    }
    for group, members in groups.items():
        whole = {name for name, kind in kinds.items() if kind in members}
        if whole & differ <= set(names) <= whole:
            return group
    return some(names)


def verdict(name: str, evidence: Sequence[Start]) -> str:
    """What is wrong with one tensor, as the rest of a sentence."""
    size = len(evidence)
    before, after = ([s.before[name] for s in evidence], [s.after[name] for s in evidence])
    wrong = [rank for rank in range(size) if not same(after[rank], before[0])]
    on = ranks_text(wrong, size)
    if any(tensor.dtype != before[0].dtype for tensor in after):
        return f"have another dtype on {on} than before. {KEEP}"
    if all(same(after[rank], before[rank]) for rank in wrong) and 0 not in wrong:
        return f"are still {on}'s own: {why_own(name, wrong, evidence)}"
    for source in range(1, size):
        if all(same(after[rank], before[source]) for rank in wrong):
            return f"are those of rank {source} on {on}, not those of rank 0."
    if all(close(tensor, before[0], 1e-2) for tensor in after):
        return f"are rank 0's to a few digits only on {on}: they were sent in a smaller dtype."
    if not any(after[rank].any() for rank in wrong):
        return f"are all zero on {on}. {KEEP}"
    mean = sum(tensor.to(high(tensor)) for tensor in before) / size
    for factor, text in ((1, "the mean"), (size, "the sum"), (1 / size, "a part")):
        if all(close(after[r].double(), factor * mean.double(), 2e-2) for r in wrong):
            return f"are {text} of all ranks' on {on}. Rank 0's alone are wanted: a broadcast."
    if all(torch.isin(after[r].double(), all_values(evidence[0].before)).all() for r in wrong):
        return (
            f"hold values of rank 0 on {on}, but those of other places. Take a flat tensor apart "
            "in the order in which it was put together."
        )
    if size == len(wrong) and all(same(tensor, after[0]) for tensor in after):
        return f"are the same on all ranks, but not what rank 0 had: its own have changed. {KEEP}"
    return f"are neither rank 0's nor their own on {on}. {KEEP}"


def all_values(tensors: dict[str, Tensor]) -> Tensor:
    """All numbers of all tensors."""
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


def why_own(name: str, wrong: Sequence[int], evidence: Sequence[Start]) -> str:
    """Why these ranks may still have their own values."""
    broadcasts = [[e for e in seen.events if e.kind == "broadcast"] for seen in evidence]
    roots = [{event.root for event in events} for events in broadcasts]
    if all(root == {rank} for rank, root in enumerate(roots)):
        return "every rank broadcasts its own. The source must be the same on all ranks: 0."
    if not_waited_for(evidence[1].events):
        return "the broadcast was started, but not waited for."
    right = evidence[0].before
    differ = [n for n in right if not all(same(seen.after[n], right[n]) for seen in evidence)]
    learn = [n for n in differ if evidence[0].kinds[n] == "parameter"]  # a forward changes buffers
    if learn and all(same(seen.after_forward[n], right[n]) for n in learn for seen in evidence):
        return "only a forward pass makes them equal. Do it in __init__."
    if not any(event.collective for event in evidence[0].events):
        return "nothing was sent in __init__. Broadcast rank 0's values to all."
    if idle := [rank for rank in wrong if not evidence[rank].events]:
        return f"{ranks_text(idle, len(evidence))} took no part. Every rank must."
    if not came(name, evidence[wrong[0]]):
        return "they were not sent. Broadcast rank 0's values of every tensor."
    return f"they were sent, but what came was not copied into them. {KEEP}"


def came(name: str, seen: Start) -> bool:
    """Whether a tensor seems to have been sent: all of its size were, or as many bytes as all."""

    def size(tensor: Tensor) -> tuple[int, str]:
        return tensor.numel(), str(tensor.dtype).removeprefix("torch.")

    sent = [size for event in seen.events for size in event.tensors]
    sizes, this = list(map(size, seen.before.values())), size(seen.before[name])
    nbytes = sum(tensor.nbytes for tensor in seen.before.values())
    in_one = sum(event.nbytes for event in seen.events) >= nbytes
    return in_one or sent.count(this) >= sizes.count(this)
