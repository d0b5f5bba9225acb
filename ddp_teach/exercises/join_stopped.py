"""Why a launch came to no good end inside ``join``, concluded from the journals of all ranks."""

from collections.abc import Sequence

from ddp_teach.exercises.journal import Journal
from ddp_teach.exercises.wording import sentence

RULE = (
    "A rank without batches stays in join and starts every collective that the others start, with "
    "zeros for gradients. Before every step all ranks count who still has one; at zero all leave."
)
NO_OP = (
    "Join ends at once on {done}, out of batches, while {active} still trains and waits for it. "
    f"{RULE}"
)
LEFT_EARLY = "{done} left join while {active} still had batches. " + RULE
OTHER_ROOTS = (
    "When all are done they have to agree on one rank that trained to the end, and broadcast from "
    "that one."
)
NEVER_LEAVES = (
    "All ranks are out of batches, but they do not leave join together: some wait for one more "
    "step. Let all ranks count, with the same all-reduce, who still has a batch; at 0 all leave."
)
BUFFERS = (
    "The forward pass of {active} starts a broadcast (of buffers, most likely) that {done}, out of "
    "batches, does not answer. " + RULE
)
BUCKETS = (
    "{done} is out of batches and answers fewer collectives than a step of {active} starts: one "
    "all-reduce for every bucket, and whatever else forward and backward send. " + RULE
)
TOO_MANY = (
    "{done} is out of batches and starts a collective that {active} does not start in its step. "
    "What is answered depends on the step: one in no_sync sends no gradients. " + RULE
)
ENTERING, LEAVING, LEFT = "entering join", "leaving join", "what comes after join"


def why_stopped(journals: Sequence[Journal]) -> str:
    """What the ranks' journals tell of a launch that came to no good end inside join."""
    left = [r for r, journal in enumerate(journals) if journal.doing == LEFT]
    leaving = [r for r, journal in enumerate(journals) if journal.doing.startswith(LEAVING)]
    active = [r for r in range(len(journals)) if r not in left and r not in leaving]
    if left and active:
        answered = not journals[left[0]].story[-2].startswith(LEAVING)
        hint, done = LEFT_EARLY if answered else NO_OP, left[0]
    elif leaving and active:
        hint, done = answered_wrongly(journals[leaving[0]], journals[active[-1]]), leaving[0]
    elif leaving:
        return OTHER_ROOTS if in_broadcast(journals) else NEVER_LEAVES
    else:
        return RULE
    return sentence(hint, done=f"rank {done}", active=f"rank {active[-1]}")


def in_broadcast(journals: Sequence[Journal]) -> bool:
    """Whether the first collective that differs is a broadcast on all ranks."""
    calls = zip(*(journal.started for journal in journals), strict=False)
    differ = next((these for these in calls if len(set(these)) > 1), ("",))
    return all(call.startswith("broadcast") for call in differ)


def answered_wrongly(done: Journal, active: Journal) -> str:
    """Where the collectives of a rank that is done differ from those of one that still trains."""
    pairs = list(zip(done.started, active.started, strict=False))
    place = next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))
    in_join = next(k for k, entry in enumerate(active.story) if entry.startswith(ENTERING))
    of_steps = {entry for entry in active.story[in_join:] if entry in active.started}
    if place == len(active.started):
        return TOO_MANY
    if active.started[place].startswith("broadcast"):
        return BUFFERS
    places = [k for k, entry in enumerate(active.story) if entry in active.started]
    if not active.story[places[place] - 1].startswith("the forward pass"):
        return BUCKETS
    too_many = place < len(done.started) and done.started[place] in of_steps
    return TOO_MANY if too_many else LEFT_EARLY
