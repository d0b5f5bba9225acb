"""What is said about unused parameters: each hint, and what in the gradients leads to it."""

from collections.abc import Iterator

from ddp_teach.exercises.probe import Finding, ranks_text
from ddp_teach.exercises.ratios import ratio_text
from ddp_teach.exercises.shares import Difference, Seen, differences

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
    "with weight decay or momentum would move it even by zeros. Agree on what was used anywhere, "
    "anew in every iteration."
)
STALE = (
    "A gradient of an earlier iteration came in again for {name}, after zero_grad(). A bucket "
    "keeps what it held: write zeros into the place of a parameter that is left out."
)
NOT_AVERAGED = (
    "{name} is not averaged, because {absent} left it out: every rank that used it keeps its own "
    "gradient. The others take part, with zeros, and the mean counts as soon as one rank used it."
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


def refused(evidence: list[bool]) -> Iterator[Finding]:
    if not all(evidence):
        yield Finding(NO_OPTION)


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


def not_kept(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        number = evidence[0].index(difference.seen[0])
        hint = (WRONG, OLD_COUNTS, ERASED)[number] if difference.name == "b" else WRONG
        yield difference.finding(filled(hint, difference, number))
        return


def outputs_missed(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        hint = OUTPUTS if difference.seen[0] is evidence[0][0] else NOT_IN_LOSS
        yield difference.finding(hint.format(name=difference.name))
        return


def lost_on_the_way(evidence: list[list[Seen]]) -> Iterator[Finding]:
    for difference in differences(evidence):
        number = 0 if difference.seen[0] is evidence[0][0] else 2
        yield difference.finding(filled(left_out_hint(difference, number), difference, number))
        return
