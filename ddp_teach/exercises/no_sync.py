"""Step no_sync: forward passes inside ``with wrapper.no_sync():`` leave their gradients local."""

from collections.abc import Sequence

from ddp_teach.exercises.collectives import Event
from ddp_teach.exercises.contexts import Interruption, context_probe
from ddp_teach.exercises.no_sync_accumulation import MOMENTS, Accumulation, accumulated_wrongly
from ddp_teach.exercises.no_sync_hints import (
    AFTERWARDS,
    ANEW,
    AS_USUAL,
    NO_FINALLY,
    RECIPE,
    decided_elsewhere,
    grew,
    nested_wrongly,
    not_put_back,
    shared_switch,
)
from ddp_teach.exercises.probe import Learner, Probe
from ddp_teach.exercises.shares import SMALLEST, Branches, Seen, Trial


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
                output = trial.forward(next(numbers), whats[k], advice=AS_USUAL)
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


def forward_here_backward_there(learner: Learner) -> list[Seen]:
    """Forward in no_sync and backward outside, and the other way round."""
    trial = Trial(learner)
    with trial.wrapper.no_sync():
        output = trial.forward(0, "a micro-batch with its forward pass in no_sync")
    output.backward()
    trial.look("after forward in no_sync and backward outside", averaged=False)
    output = trial.forward(1, "a micro-batch with only its backward pass in no_sync")
    with trial.wrapper.no_sync():
        output.backward()
    trial.look("after forward outside and backward in no_sync", averaged=True)
    return trial.seen


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


def two_wrappers(learner: Learner) -> list[Seen]:
    """One wrapper trains while another one is in no_sync."""
    other, trial = learner.wrap(Branches()), Trial(learner)
    with other.no_sync():
        trial.step(0, "a wrapper while another one is in no_sync")
    trial.look("while another wrapper is in no_sync", averaged=True)
    return trial.seen


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


PROBES = [
    context_probe("no_sync", RECIPE),
    Probe("three micro-batches in no_sync, two after it", accumulate, accumulated_wrongly, (3,)),
    Probe("forward and backward on two sides of no_sync", forward_here_backward_there,
          decided_elsewhere, (3,)),
    Probe("an exception inside no_sync", interrupt, not_put_back, (3,)),
    Probe("one no_sync inside another", nest, nested_wrongly, (3,)),
    Probe("two wrappers, one of them in no_sync", two_wrappers, shared_switch, (3,)),
    Probe("no_sync used three times", count_all_reduces, grew, (3,)),
]  # fmt: skip
