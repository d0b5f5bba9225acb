"""What is said about ``no_sync`` as a context: that it ends, nests, lets exceptions through."""

from collections.abc import Iterator

from ddp_teach.exercises.probe import Finding
from ddp_teach.exercises.shares import Seen, differences

RECIPE = (
    "Write it as a generator under @contextlib.contextmanager: switch averaging off, yield, and "
    "put the switch back in a finally block."
)
AS_USUAL = (
    "Inside no_sync forward and backward run as usual, only nothing is sent: it is not "
    "torch.no_grad()."
)
AFTERWARDS = "Whatever no_sync changes must be as before when its block ends. " + RECIPE
ANEW = "Every call of no_sync() must return a new context manager: one can be used only once."
AFTER_WRONG = (
    "The first backward after no_sync must leave the mean over all ranks of everything that has "
    "accumulated since zero_grad()."
)
LOST = "Entering or leaving no_sync has thrown gradients away. Both leave param.grad as it is."
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
TURNED_OVER = (
    "A no_sync inside another one averages: it has turned the switch over. Set it to False, "
    "whatever it was, and put back what it was."
)
NOT_NESTED = (
    "Leaving an inner no_sync has ended the outer one as well. Remember what the switch was "
    "before, and put that back, not simply True."
)
SHARED = (
    "no_sync of one wrapper has switched off another. Keep the switch in self, not in the class or "
    "in a global variable."
)
MORE_HOOKS = (
    "With every use of no_sync later backward passes start more all-reduces: {before} before, "
    "{after} after. Register hooks once, in the constructor, and let them look at a switch."
)


def decided_elsewhere(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        letters = difference.letters()
        lost = "0" in letters and len(letters) == 2
        local = letters in ("l", "m", "ll")
        yield difference.finding(FORWARD_DECIDES if local else LOST if lost else AFTER_WRONG)
        return


def not_put_back(evidence: list[tuple[bool, list[Seen]]]) -> Iterator[Finding]:
    if not all(came_through for came_through, _ in evidence):
        yield Finding(SWALLOWED)
        return
    for difference in differences([seen for _, seen in evidence]):
        yield difference.finding(NO_FINALLY if difference.letters() == "l" else AFTERWARDS)
        return


def nested_wrongly(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        hints = {"inside two": TURNED_OVER, "after the ": NOT_NESTED, "after both": AFTERWARDS}
        yield difference.finding(hints[difference.where[:10]])
        return


def shared_switch(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        yield difference.finding(SHARED)
        return


def grew(evidence: list[tuple[int, int]]) -> Iterator[Finding]:
    before, after = evidence[0]
    if after > before:
        yield Finding(MORE_HOOKS.format(before=before, after=after))
