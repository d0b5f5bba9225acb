"""The hang report: when time is up, where every rank stands and what it waits for.

Each rank answers for itself, in a thread of its own, while it hangs; the launching process puts the
answers together. Only then can be seen who has not come: a rank that waits can't know it.
"""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ddp_teach.bucket_queue import sent
from ddp_teach.stacks import readers, short_name, stack

if TYPE_CHECKING:
    from ddp_teach.rank_process import RankProcess


# In a rank.


def where(thread: int, until: str) -> dict[str, Any]:
    """Where this rank stands, in plain types: the stack of ``thread``, outermost call first, from
    what the file ``until`` called; what it waits for; how many buckets and collectives it started.
    """
    stacks = {ident: list(calls(last, until)) for ident, last in sys._current_frames().items()}
    frames = stacks.pop(thread)
    # Other threads as well: a backward pass on a GPU has its own.
    waits_for, comes_from = waiting([*frames, *(f for others in stacks.values() for f in others)])
    # A frame that is just being entered has no line yet.
    places = [(f.f_code, f.f_lineno or f.f_code.co_firstlineno) for f in frames[::-1]]
    collectives = None
    with contextlib.suppress(Exception):  # torch has no public name for it
        collectives = dist.group.WORLD._get_sequence_number_for_group()
    return {
        "frames": [(code.co_filename, line, code.co_name) for code, line in places],
        "waits_for": waits_for,
        "comes_from": comes_from,
        "sent": dict(sent),
        "collectives": collectives,
    }


def calls(frame: FrameType | None, until: str) -> Iterator[FrameType]:
    """The frames of a running function, innermost call first, up to those of the file ``until``."""
    while frame is not None and frame.f_code.co_filename != until:
        yield frame
        frame = frame.f_back


def waiting(frames: Iterable[FrameType]) -> tuple[str, tuple[str, list[int], int] | None]:
    """What an object says that it waits for, and from whom it must come, if one of ``frames``
    belongs to a method of such an object.

    It has a method ``waits_for()``, which returns a text such as "bucket 0 of 3 (fc.weight)", and
    perhaps another, ``comes_from()``, which ``BucketQueue`` explains.
    """
    for frame in frames:
        with contextlib.suppress(Exception):  # it is asked in the middle of whatever it does
            it = frame.f_locals["self"]
            if what := it.waits_for():
                return str(what), it.comes_from() if hasattr(it, "comes_from") else None
    return "", None


# In the launching process.


def hang_report(ranks: list["RankProcess"]) -> tuple[str, str]:
    """What the ranks have answered, in lines at the reader's level, and all stacks in full."""
    lines = [f"rank {rank.number} {standing(rank, ranks)}" for rank in ranks]
    started = {r.number: r.stands["collectives"] for r in ranks if r.stands}
    if len(set(started.values()) - {None}) > 1:
        each = (f"{count} on rank {number}" for number, count in started.items())
        lines.append(f"collectives started: {', '.join(each)}")
    on_their_way = (rank for rank in ranks if rank.stands and not rank.returned)
    full = (f"rank {rank.number}{stack(rank.stands['frames'], str)}" for rank in on_their_way)
    return "\n".join(lines), "\n".join(full)


def standing(rank: "RankProcess", ranks: list["RankProcess"]) -> str:
    """Where one rank stands."""
    if rank.returned:
        return "has returned"
    if rank.stands is None:
        return "gives no answer: it is stopped, or held up outside Python"
    state = "is running" if rank.running else "is starting"
    if rank.stands["waits_for"]:
        state = f"waits for {rank.stands['waits_for']}"
        if rank.stands["comes_from"]:
            state += not_sent(*rank.stands["comes_from"], ranks)
    frames = rank.stands["frames"]
    return state + stack(readers(frames) or frames[-1:], short_name)


def not_sent(group: str, members: list[int], number: int, ranks: list["RankProcess"]) -> str:
    """Which of ``members`` have not sent their bucket of this ``number`` over ``group``."""
    answers = {member: ranks[member].stands for member in members}
    missing = [
        m for m, answer in answers.items() if answer and answer["sent"].get(group, 0) < number
    ]
    silent = [m for m, answer in answers.items() if not answer]
    if missing:
        perhaps = f", nor perhaps {names(silent)}" if silent else ""
        return (
            f", which {names(missing)} {'has' if len(missing) == 1 else 'have'} not sent{perhaps}"
        )
    return f", which all ranks have sent{f' except perhaps {names(silent)}' if silent else ''}"


def names(numbers: list[int]) -> str:
    """ "rank 1", "ranks 1 and 2"."""
    *most, last = map(str, numbers)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
