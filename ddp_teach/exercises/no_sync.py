"""Step no_sync: forward passes inside ``with wrapper.no_sync():`` leave their gradients local."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_teach.exercises.contexts import Interruption, context_probe
from ddp_teach.exercises.probe import Event, Finding, Learner, Probe
from ddp_teach.exercises.shares import SMALLEST, Branches, Difference, Seen, Trial, differences
from ddp_teach.exercises.verdicts import ratio_text

RECIPE = (
    "Write it as a generator under @contextlib.contextmanager: switch averaging off, yield, and "
    "put the switch back in a finally block."
)
AFTERWARDS = "Whatever no_sync changes must be as before when its block ends. " + RECIPE
NO_EFFECT = f"no_sync has no effect: gradients are averaged inside it. {RECIPE}"
ANEW = "Every call of no_sync() must return a new context manager: one can be used only once."
INVERTED = "The switch is the wrong way round: averaged inside no_sync, local outside."
SWITCHED_LATE = (
    "no_sync begins one forward pass too late (off by one): the first backward inside it still "
    "averages. Look at the switch in the very forward pass that runs."
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
    "added to it. Hooks of register_post_accumulate_grad_hook run after that."
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
AFTER_WRONG = (
    "The first backward after no_sync must leave the mean over all ranks of everything that has "
    "accumulated since zero_grad()."
)
LEFT_OVER = (
    "Gradients from before zero_grad() came in again. Keep no copy of what accumulates in no_sync "
    "beside param.grad, or empty it after every average."
)
TURNS = "It was right in turn 1: something is not as before when no_sync has been used."
FORWARD_DECIDES = (
    "The forward pass decides whether its gradients are averaged, wherever its backward runs: keep "
    "in forward what the switch says, and let backward go by that."
)
NO_FINALLY = (
    "After an exception inside no_sync gradients are not averaged any more. The switch has to be "
    "put back in a finally block, which runs in that case too."
)
SWALLOWED = (
    "no_sync swallows an exception that is raised inside it. Let it through: put the switch back "
    "in a finally block, without except, and without returning True from __exit__."
)
NOT_NESTED = (
    "Leaving an inner no_sync has ended the outer one as well. Remember what the switch was "
    "before, and put that back, not simply True."
)
SHARED = (
    "no_sync of one wrapper has switched off another. Keep the switch in self, not in the class or "
    "in a global variable."
)
SENDS_INSIDE = (
    "A backward pass inside no_sync sends gradients, though it leaves them local in the end. To "
    "save that communication is what no_sync is for."
)
MORE_HOOKS = (
    "With every use of no_sync later backward passes start more all-reduces: {before} before, "
    "{after} after. Register hooks once, in the constructor, and let them look at a switch."
)
AFTER = {  # by the letters of the three batches in no_sync and of the one after it
    "lllm": ONLY_LAST, "000m": LOST, "mmm0": NOT_THE_LAST, "222m": COUNTED_AGAIN,
    "++++": COUNTED_AGAIN, "+++m": COUNTED_AGAIN, "sssm": NOT_DIVIDED, "2222": COUNTED_AGAIN,
    "2222m": KEPT,
}  # fmt: skip


@dataclass
class Accumulation:
    """Evidence: what was ``seen``, and the most that one backward pass inside no_sync has sent, as
    a part of all gradients."""

    seen: list[Seen]
    sent_inside: float


MOMENTS = (
    "after the 1st micro-batch in no_sync",
    "after the 2nd micro-batch in no_sync",
    "after the 3rd micro-batch in no_sync",
    "when no_sync has ended",
    "after the 1st micro-batch after no_sync",
    "after the 2nd micro-batch after no_sync",
)


def accumulate(learner: Learner) -> Accumulation:
    """Three times: three micro-batches in no_sync, then two after it."""
    trial = Trial(learner, bucket_cap_mb=SMALLEST)
    all_numbers = sum(p.numel() for p in trial.wrapper.parameters())
    sent = 0
    for turn in (1, 2, 3):
        moments = [f"{moment}, turn {turn} of 3" for moment in MOMENTS]
        whats = [moment.removeprefix("after ") for moment in moments]
        numbers = iter(range(5 * turn - 5, 5 * turn))
        learner.doing(f"entering no_sync, turn {turn} of 3", RECIPE if turn == 1 else ANEW)
        with trial.wrapper.no_sync():
            for k in (0, 1, 2):
                output = trial.forward(next(numbers), whats[k])
                before = len(learner.events)
                output.backward()
                sent = max(sent, numbers_sent(learner.events[before:]))
                trial.look(moments[k], averaged=False)
            learner.doing("leaving no_sync", AFTERWARDS)
        trial.look(moments[3], averaged=False)
        for k in (4, 5):
            trial.step(next(numbers), whats[k], advice=AFTERWARDS)
            trial.look(moments[k], averaged=True)
        trial.forget(set_to_none=turn == 1)
    return Accumulation(trial.seen, sent / all_numbers)


def numbers_sent(events: Sequence[Event]) -> int:
    """How many floating-point numbers the collectives among the events carried."""
    sizes = [size for event in events for size in event.tensors]
    return sum(numel for numel, dtype in sizes if "float" in dtype)


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


def forward_here_backward_there(learner: Learner) -> list[Seen]:
    """Forward in no_sync and backward outside, and the other way round."""
    trial = Trial(learner)
    with trial.wrapper.no_sync():
        output = trial.forward(0, "a micro-batch with its forward pass in no_sync")
    output.backward()
    trial.look("after forward in no_sync and backward outside", averaged=False)
    trial.forget()
    output = trial.forward(1, "a micro-batch with only its backward pass in no_sync")
    with trial.wrapper.no_sync():
        output.backward()
    trial.look("after forward outside and backward in no_sync", averaged=True)
    return trial.seen


def decided_elsewhere(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        yield difference.finding(FORWARD_DECIDES if difference.letters() in "lm" else AFTER_WRONG)
        return


def interrupt(learner: Learner) -> tuple[bool, list[Seen]]:
    """Whether an exception came through no_sync, and how training goes on after it."""
    trial = Trial(learner)
    came_through = False
    try:
        with trial.wrapper.no_sync():
            trial.forward(0, "a micro-batch in no_sync").backward()
            raise Interruption("raised inside no_sync by this check, on purpose")
    except Interruption:
        came_through = True
    trial.forget()
    trial.step(1, "a step after an exception in no_sync", advice=NO_FINALLY)
    trial.look("in a normal step after an exception in no_sync", averaged=True)
    return came_through, trial.seen


def not_put_back(evidence: list[tuple[bool, list[Seen]]]) -> Iterator[Finding]:
    if not all(came_through for came_through, _ in evidence):
        yield Finding(SWALLOWED)
        return
    for difference in differences([seen for _, seen in evidence]):
        yield difference.finding(NO_FINALLY if difference.letters() == "l" else AFTERWARDS)
        return


def nest(learner: Learner) -> list[Seen]:
    """A no_sync inside another one, left before it."""
    trial = Trial(learner)
    learner.doing("entering no_sync inside no_sync", RECIPE)
    with trial.wrapper.no_sync():
        with trial.wrapper.no_sync():
            trial.step(0, "a micro-batch in two nested no_sync")
            trial.look("inside two nested no_sync", averaged=False)
        trial.step(1, "a micro-batch in the outer no_sync")
        trial.look("after the inner no_sync, inside the outer one", averaged=False)
    trial.step(2, "a micro-batch after both no_sync")
    trial.look("after both no_sync", averaged=True)
    return trial.seen


def nested_wrongly(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        outer = difference.where.startswith("after the inner")
        yield difference.finding(NOT_NESTED if outer else AFTERWARDS)
        return


def two_wrappers(learner: Learner) -> list[Seen]:
    """One wrapper trains while another one is in no_sync."""
    other, trial = learner.wrap(Branches()), Trial(learner)
    with other.no_sync():
        trial.step(0, "a wrapper while another one is in no_sync")
    trial.look("while another wrapper is in no_sync", averaged=True)
    return trial.seen


def shared_switch(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        yield difference.finding(SHARED)
        return


def count_all_reduces(learner: Learner) -> tuple[int, int]:
    """All-reduces of one backward pass, before and after three uses of no_sync."""
    trial = Trial(learner)

    def count() -> int:
        output = trial.forward(0, "a normal step")
        before = len(learner.events)
        output.backward()
        return sum(event.kind == "all_reduce" for event in learner.events[before:])

    *_, first = count(), count(), count()  # buckets may be cut anew after the first steps
    for _ in range(3):
        with trial.wrapper.no_sync():
            trial.step(0, "a micro-batch in no_sync")
    return first, count()


def grew(evidence: list[tuple[int, int]]) -> Iterator[Finding]:
    before, after = evidence[0]
    if after > before:
        yield Finding(MORE_HOOKS.format(before=before, after=after))


PROBES = [
    context_probe("no_sync", RECIPE),
    Probe("three micro-batches in no_sync, two after it", accumulate, accumulated_wrongly, (3,)),
    Probe("forward and backward on two sides of no_sync", forward_here_backward_there,
          decided_elsewhere, (2,)),
    Probe("an exception inside no_sync", interrupt, not_put_back, (2,)),
    Probe("one no_sync inside another", nest, nested_wrongly, (2,)),
    Probe("two wrappers, one of them in no_sync", two_wrappers, shared_switch, (2,)),
    Probe("no_sync used three times", count_all_reduces, grew, (2,)),
]  # fmt: skip
