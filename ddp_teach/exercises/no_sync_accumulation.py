"""What is said about gradients that accumulate in ``no_sync``: each hint, and what leads to it."""

from collections.abc import Iterator
from dataclasses import dataclass

from ddp_teach.exercises.no_sync_hints import AFTER_WRONG, RECIPE
from ddp_teach.exercises.probe import Finding
from ddp_teach.exercises.ratios import ratio_text
from ddp_teach.exercises.shares import Difference, Seen, differences

NO_EFFECT = f"no_sync has no effect: gradients are averaged inside it. {RECIPE}"
INVERTED = "The switch is the wrong way round: averaged inside no_sync, local outside."
SWITCHED_LATE = (
    "no_sync begins one forward pass too late (off by one): the first backward inside it still "
    "averages. Look at the switch in the very forward pass that runs."
)
ENDS_EARLY = (
    "no_sync ends too early (off by one): a backward inside it averages already, and all that has "
    "accumulated with it. Averaging begins with the first forward pass after the with block."
)
RELEASED_LATE = (
    "no_sync ends one forward pass too late (off by one): the first backward after it leaves its "
    "gradients local as well. The switch must be back when the with block ends."
)
NEVER_BACK = "After no_sync gradients are never averaged again. Put the switch back when it ends."
AT_THE_END = (
    "Leaving no_sync has changed the gradients. They stay as they are until the next backward "
    "through a forward pass outside, which averages all that has accumulated."
)
ONLY_LAST = (
    "Only the micro-batch after no_sync was averaged; what had accumulated inside stayed local. "
    "Average the whole of param.grad, once the new gradient has been added to it."
)
LOST = (
    "What had accumulated inside no_sync is lost: the average of the last micro-batch took its "
    "place. Average the whole of param.grad, not the new gradient alone."
)
NOT_THE_LAST = (
    "The micro-batch after no_sync is missing: param.grad was sent before its gradient had been "
    "added to it. Hooks of register_hook run before that, those of "
    "register_post_accumulate_grad_hook after it; and what counts gradients must not count those "
    "inside no_sync."
)
DROPPED = (
    "Gradients are lost inside no_sync. There backward must do what it does without a wrapper: add "
    "this rank's gradient to param.grad."
)
OVERWRITTEN = (
    "Inside no_sync a gradient takes the place of the one before. They must add up, as they do "
    "without a wrapper."
)
INSIDE = (
    "Inside no_sync param.grad must be what it is without a wrapper: the sum of this rank's own "
    "gradients, undivided."
)
COUNTED_AGAIN = (
    "What had accumulated came in twice. The average takes the place of param.grad; it is not "
    "added to what stands there, and what stands there is sent once."
)
NOT_DIVIDED = (
    "What had accumulated inside no_sync was summed over the ranks, not averaged. Divide the whole "
    "by the world size."
)
AGAIN = (
    "An average that is already there was changed by the next backward pass. The mean of equal "
    "gradients is that gradient: divide all that is summed by the world size."
)
KEPT = (
    "An average that is already there came in once more in the next backward pass. Send what "
    "stands in param.grad, and keep nothing beside it."
)
LEFT_OVER = (
    "Gradients from before zero_grad() came in again. Keep no copy of what accumulates in no_sync "
    "beside param.grad, or empty it after every average."
)
TURNS = "It was right in turn 1: something is not as before when no_sync has been used."
SENDS_INSIDE = (
    "A backward pass inside no_sync sends gradients, though it leaves them local in the end. To "
    "save that communication is what no_sync is for."
)
AFTER = {  # by the letters of the three batches in no_sync and of the one after it
    "lllm": ONLY_LAST, "000m": LOST, "mmm0": NOT_THE_LAST, "222m": COUNTED_AGAIN,
    "++++": COUNTED_AGAIN, "+++m": COUNTED_AGAIN, "sssm": NOT_DIVIDED, "2222": COUNTED_AGAIN,
    "2222m": KEPT,
}  # fmt: skip
MOMENTS = (
    "after the 1st micro-batch in no_sync",
    "after the 2nd micro-batch in no_sync",
    "after the 3rd micro-batch in no_sync",
    "when no_sync has ended",
    "after the 1st micro-batch after no_sync",
    "after the 2nd micro-batch after no_sync",
)


@dataclass
class Accumulation:
    """Evidence: what was ``seen``, and the most that one backward pass inside no_sync has sent, as
    a part of all gradients."""

    seen: list[Seen]
    sent_inside: float


def accumulated_wrongly(evidence: list[Accumulation]) -> Iterator[Finding]:
    found = list(differences([e.seen for e in evidence]))
    if found:
        yield found[0].finding(accumulation_hint(found))
    elif max(e.sent_inside for e in evidence) >= 1:
        yield Finding(SENDS_INSIDE)


def accumulation_hint(found: list[Difference]) -> str:
    """Told by the first difference; where that leaves two causes, by what came after it."""
    first = found[0]
    moment, _, turn = first.where.partition(", ")
    if first.strangers():
        return LEFT_OVER
    later = {d.where.partition(", ")[0]: d.letters() for d in found if d.where.endswith(turn)}
    place, now = MOMENTS.index(moment), first.letters()
    hint = inside_hint(place, now, later) if place < 4 else after_hint(now, later, first)
    return hint if turn == "turn 1 of 3" else f"{hint} {TURNS}"


def inside_hint(place: int, now: str, later: dict[str, str]) -> str:
    """For gradients that are not the local ones inside no_sync."""
    if place == 3:
        return AT_THE_END
    if place == 0 and now in "ms":
        if later.get(MOMENTS[1], "ll")[1] == "l":
            return SWITCHED_LATE
        return INVERTED if later.get(MOMENTS[4], "mmmm")[3] == "l" else NO_EFFECT
    if now[-1] == "0":
        return DROPPED
    if set(now) == {"m"}:
        return ENDS_EARLY
    return OVERWRITTEN if now in ("0l", "00l") else INSIDE


def after_hint(now: str, later: dict[str, str], first: Difference) -> str:
    """For gradients that are not the mean after no_sync."""
    if now == "llll":
        return NEVER_BACK if later.get(MOMENTS[5], "m")[-1] == "l" else RELEASED_LATE
    if now in AFTER:
        return AFTER[now]
    if (ratio := first.ratio()) is not None and len(now) == 4:
        return f"Gradients {ratio_text(ratio, first.world_size, 'all ranks').replace('@', '')}"
    return AGAIN if len(now) == 5 else AFTER_WRONG
