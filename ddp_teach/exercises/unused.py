"""Step unused: parameters that a forward pass leaves out, on some ranks or on all of them."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_teach.exercises.probe import Finding, Learner, Probe, ranks_text
from ddp_teach.exercises.shares import (
    SMALLEST,
    Branches,
    Difference,
    Seen,
    Trial,
    batch,
    differences,
)
from ddp_teach.exercises.verdicts import ratio_text

NO_OPTION = (
    "The constructor takes no argument find_unused_parameters. It is given as "
    "find_unused_parameters=True where a forward pass may leave out parameters."
)
ZEROS = (
    "A parameter that this rank leaves out gets no gradient and its hook never runs. Send zeros in "
    "its place, so that every rank sends every bucket."
)
ANEW = (
    "Which parameters are left out differs from one iteration to the next and from rank to rank. "
    "Look anew in every forward pass, and begin every backward with nothing left of the last."
)
NOT_NONE = (
    "No rank used {name}, so its .grad must stay None, as it does without a wrapper: an optimizer "
    "with weight decay or momentum would move it even by zeros. Agree on what was used anywhere."
)
STALE = (
    "A gradient of an earlier iteration came in again for {name}, after zero_grad(). A bucket "
    "keeps what it held: write zeros into the place of a parameter that is left out."
)
NOT_AVERAGED = (
    "{name} is not averaged, because {absent} left it out: every rank that used it keeps its own "
    "gradient. The others have to take part, with zeros."
)
NOT_SENT = (
    "{name} is not averaged, though all ranks used it: its bucket was never sent, because it waits "
    "for a parameter that is left out. Send zeros in the place of that one."
)
BY_USERS = (
    "The gradient of {name} was divided by the number of ranks that used it. Divide by the world "
    "size: a rank that left it out counts, with a gradient of zero."
)
NOT_FOR_ALL = (
    "{absent} left {name} out and did not get the average. All ranks take the same optimizer step, "
    "so all of them need it: where .grad is None, make one."
)
THROWN_AWAY = (
    "The gradient of {name} is lost, though {users} used it. It counts for all ranks as soon as "
    "one of them used it."
)
WRONG = (
    "The gradient of {name} must be the sum over those ranks that used it, divided by the world "
    "size, and the same on every rank."
)
EARLY_LOCAL = (
    "{name} was used inside no_sync and left out in the last micro-batch: its gradient was never "
    "averaged. A parameter counts as used if anything was added to it since the last average."
)
EARLY_LOST = (
    "{name} was used inside no_sync and left out in the last micro-batch: what had accumulated is "
    "lost. Send param.grad, and zeros only where that is None."
)
OLD_COUNTS = (
    "{absent} left {name} out, but its .grad still holds what had accumulated before. Send that, "
    "and zeros only where .grad is None."
)
ERASED = (
    "No rank used {name} in this iteration, but it has a gradient from before, not zeroed yet. "
    "That must stay as it is."
)
OUTPUTS = (
    "{name} is reached only through an output that lies deeper inside what forward returned, in a "
    "list, tuple or dict. Start from every tensor in it, not from the first."
)
NOT_IN_LOSS = (
    "The loss uses one output only, so {name} gets no gradient, though the graph of the outputs "
    "reaches it. Whatever is still missing when backward ends has to be sent as zeros."
)
ONCE_PER_NODE = (
    "If you walk through the autograd graph, keep a set of the nodes seen: with 40 residual "
    "connections there are 2 to the power of 40 ways through it."
)
NO_GRAPH = "Under torch.no_grad() an output has no graph: its grad_fn is None."


def takes_the_option(learner: Learner) -> bool:
    return learner.accepts("find_unused_parameters")


def refused(evidence: list[bool]) -> Iterator[Finding]:
    if not all(evidence):
        yield Finding(NO_OPTION)


PLAN = (  # what the ranks use in each iteration, and how that is told
    (("ac", "abc", "abc"), "where rank 0 leaves out b"),
    (("ac", "ac", "ac"), "where no rank uses b"),
    (("ab", "ab", "abc"), "where only rank 2 uses c"),
    (("bc", "cba", "ab"), "where rank 0 leaves out a and rank 2 leaves out c"),
    (("abc", "abc", "abc"), "where all ranks use all"),
    (("bc", "bc", "c"), "where no rank uses a and rank 2 leaves out b"),
)


def change_what_is_used(learner: Learner, **options: float) -> list[Seen]:
    """Iterations in each of which something else is left out."""
    trial = Trial(learner, find_unused_parameters=True, **options)
    for number, (uses, where) in enumerate(PLAN):
        what = f"iteration {number + 1}, {where}"
        trial.step(number, what, uses[dist.get_rank()], ANEW if number else ZEROS)
        trial.look(f"in {what}", averaged=True)
        trial.forget()
    return trial.seen


def change_with_small_buckets(learner: Learner) -> list[Seen]:
    return change_what_is_used(learner, bucket_cap_mb=SMALLEST)


def left_out_wrongly(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        number = evidence[0].index(difference.seen[0])
        yield difference.finding(filled(left_out_hint(difference, number), difference, number))
        return


def filled(hint: str, difference: Difference, number: int) -> str:
    """The hint with the names of the parameter and of the ranks."""
    users, size = difference.users(number), difference.world_size
    absent = [rank for rank in range(size) if rank not in users]
    texts = [ranks_text(ranks, size) if ranks else "no rank" for ranks in (users, absent)]
    hint = hint.format(name=difference.name, users=texts[0], absent=texts[1])
    return hint[0].upper() + hint[1:] if hint.startswith("rank") else hint


def left_out_hint(difference: Difference, number: int) -> str:
    """What an iteration that began without gradients shows."""
    users, columns = difference.users(number), difference.columns(number)
    own = [columns[rank][rank] for rank in users]
    shares = {round(columns[rank][user], 3) for rank in users for user in users}
    others = [columns[rank] for rank in range(len(columns)) if rank not in users]
    if difference.strangers():
        return STALE
    if not users:
        return NOT_NONE
    if not any(map(any, columns)):
        return THROWN_AWAY
    alone = set(own) == {1.0} and all(sum(columns[rank]) == 1 for rank in users)
    if alone and (len(users) > 1 or not any(map(any, others))):
        return NOT_AVERAGED if others else NOT_SENT
    if shares == {round(1 / len(users), 3)} and len(users) < len(columns):
        return BY_USERS
    if shares == {round(1 / len(columns), 3)} and not any(map(any, others)):
        return NOT_FOR_ALL
    ratio = difference.ratio()
    if ratio is not None:
        return f"Gradients {ratio_text(ratio, len(columns), 'all ranks').replace('@', '')}"
    return WRONG


def use_early(learner: Learner) -> list[Seen]:
    """Parameter b is used in no_sync, by all ranks and then by rank 0, and left out after it."""
    trial = Trial(learner, find_unused_parameters=True)
    for number, early in ((0, "abc"), (2, "abc" if dist.get_rank() == 0 else "ac")):
        who = "all ranks use" if number == 0 else "rank 0 uses"
        with trial.wrapper.no_sync():
            trial.step(number, f"a micro-batch in no_sync, where {who} b", early)
        trial.step(number + 1, "a micro-batch after no_sync, where no rank uses b", "ac")
        trial.look(f"when {who} b in no_sync and nobody after it", averaged=True)
        trial.forget()
    return trial.seen


def early_use_forgotten(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        number = 0 if difference.seen[0] is evidence[0][0] else 2
        columns = difference.columns(number)
        alone = all(
            share == (rank == user and user in difference.users(number))
            for rank, column in enumerate(columns)
            for user, share in enumerate(column)
        )
        hint = EARLY_LOCAL if alone else WRONG if any(map(any, columns)) else EARLY_LOST
        yield difference.finding(filled(hint, difference, number))
        return


def keep_gradients(learner: Learner) -> list[Seen]:
    """Three iterations without zero_grad() between them."""
    trial = Trial(learner, find_unused_parameters=True)
    late = "ac" if dist.get_rank() == 0 else "abc"
    plan = (("abc", "all ranks use all"), (late, "rank 0 leaves out b"), ("ac", "no rank uses b"))
    for number, (use, where) in enumerate(plan):
        what = f"iteration {number + 1} without zero_grad(), where {where}"
        trial.step(number, what, use)
        trial.look(f"in {what}", averaged=True)
    return trial.seen


def not_kept(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        number = evidence[0].index(difference.seen[0])
        hint = (WRONG, OLD_COUNTS, ERASED)[number] if difference.name == "b" else WRONG
        yield difference.finding(filled(hint, difference, number))
        return


class Nested(Branches):
    """Returns the branches one by one, in a dict, a list and a tuple."""

    def forward(self, x: Tensor, use: str = "") -> dict[str, Any]:
        a, b, c = ((getattr(self, name) * x).sum() for name in "abc")
        return {"first": a, "more": [b, (c, None, 3)]}


def look_at_outputs(learner: Learner) -> list[Seen]:
    """Nested outputs, all of them in the loss and then only one."""
    trial = Trial(learner, module=Nested(), find_unused_parameters=True, bucket_cap_mb=SMALLEST)
    output = trial.forward(0, "a model that returns a dict with a list with a tuple")
    (output["first"] + output["more"][0] + output["more"][1][0]).backward()
    trial.look("when the outputs lie in a dict, a list and a tuple", averaged=True)
    trial.forget()
    only = "a loss that uses one of three outputs"
    trial.forward(1, only, "b", NOT_IN_LOSS.format(name="a"))["more"][0].backward()
    trial.look(f"with {only}", averaged=True)
    return trial.seen


def outputs_missed(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        hint = OUTPUTS if difference.seen[0] is evidence[0][0] else NOT_IN_LOSS
        yield difference.finding(hint.format(name=difference.name))
        return


class Residual(Branches):
    """Forty residual connections in a row: each doubles the number of paths through the graph."""

    def forward(self, x: Tensor, use: str = "abc") -> Tensor:
        h = super().forward(x, use)
        for _ in range(40):
            h = h / 2 + h / 2
        return h


def many_paths(learner: Learner) -> list[Seen]:
    """A graph with more paths than anybody can walk, and a forward pass without a graph."""
    trial = Trial(learner, module=Residual(), find_unused_parameters=True)
    trial.step(0, "a model with 40 residual connections", "ac", ONCE_PER_NODE)
    trial.look("in a model with 40 residual connections", averaged=True)
    trial.forget()
    learner.doing("an evaluation under torch.no_grad()", NO_GRAPH)
    with torch.no_grad():
        trial.wrapper(batch(dist.get_rank(), 1))
    trial.step(2, "a step after an evaluation", "ab")
    trial.look("in a step after an evaluation under torch.no_grad()", averaged=True)
    return trial.seen


def lost_on_the_way(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        number = 0 if difference.seen[0] is evidence[0][0] else 2
        yield difference.finding(filled(left_out_hint(difference, number), difference, number))
        return


PROBES = [
    Probe("the constructor", takes_the_option, refused, (2,)),
    Probe("parameters left out, other ones in every iteration", change_what_is_used,
          left_out_wrongly, (3,)),
    Probe("parameters left out, a bucket for each parameter", change_with_small_buckets,
          left_out_wrongly, (3,)),
    Probe("a parameter used only inside no_sync", use_early, early_use_forgotten, (3,)),
    Probe("gradients that are not zeroed", keep_gradients, not_kept, (2,)),
    Probe("outputs of several kinds", look_at_outputs, outputs_missed, (2,)),
    Probe("a model with many residual connections", many_paths, lost_on_the_way, (2,)),
]  # fmt: skip
