"""Wrappers for step unused: see ``planted``. Each is a whole wrapper with one method replaced."""

import torch
import torch.distributed as dist
from complete_wrappers import GraphWalk, MultiGradHooks, OnTheLadder, cut
from planted import Planted, fault, right
from torch.utils._pytree import tree_leaves

UNUSED = Planted("unused")
STOPPED = Planted("unused")  # those that hang, or raise on some ranks only


def tensors_in(output):
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


@right(UNUSED)
class NeverWalks(GraphWalk):
    """What is missing at the end of backward is sent then: no overlap for the rest, but right."""

    def unused_in(self, output):
        return set()


@right(UNUSED)
class AsksTheEngine(GraphWalk):
    """Looks which nodes the backward pass will run, when its first gradient is ready."""

    def unused_in(self, output):
        return set()

    def gradient_ready(self, param):
        if self.sync_backward and not self.begun:
            nodes = {p: torch.autograd.graph.get_gradient_edge(p).node for p in self.params}
            runs = torch._C._will_engine_execute_node
            unused = {p for p, node in nodes.items() if not runs(node)}
            self.missing = [missing - unused for missing in self.missing]
        super().gradient_ready(param)


@right(UNUSED)
class CountsInTheBucket(GraphWalk):
    """A flag per parameter travels in front of its gradient: no all-reduce of its own for them."""

    def part(self, param, zeros):
        flag = torch.tensor([0.0 if zeros or param not in self.used else 1.0])
        return torch.cat([flag.to(param.dtype), super().part(param, zeros)])

    @torch.no_grad()
    def finish(self):
        while len(self.works) < len(self.buckets):
            self.launch()
        for bucket, (work, flat) in zip(self.buckets, self.works, strict=True):
            work.wait()
            parts = flat.split([1 + p.numel() for p in bucket])
            for param, part in zip(bucket, parts, strict=True):
                if part[0] > 0:
                    self.write_back(param, part[1:].view_as(param))
        self.works, self.used = [], set()
        self.missing, self.begun = [set(bucket) for bucket in self.buckets], False


# Waiting for a gradient that never comes.


@fault(STOPPED, "takes no argument find_unused_parameters")
class NoArgument(GraphWalk):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb)


@fault(STOPPED, "iteration 1", "Send zeros in its place")
class TakesTheArgumentOnly(GraphWalk):
    def __init__(self, module, bucket_cap_mb=25, find_unused_parameters=False):
        super().__init__(module, bucket_cap_mb)


class LeavesUnfilledBuckets(GraphWalk):
    """Waits for the buckets that were sent, and for no others."""

    def unused_in(self, output):
        return set()

    @torch.no_grad()
    def finish(self):
        for bucket, (work, flat) in zip(self.buckets, self.works, strict=False):
            work.wait()
            for param, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                self.write_back(param, mean.view_as(param))
        self.works, self.used = [], set()
        self.missing, self.begun = [set(bucket) for bucket in self.buckets], False


@fault(STOPPED, "iteration 1", "Rank 1 waits for rank 0 in collective", "Send zeros in its place")
class SomeRanksSendTheBucket(LeavesUnfilledBuckets):
    pass


@fault(UNUSED, "is not averaged, because rank 0 left it out")
class SendsWhatAllHave(LeavesUnfilledBuckets):
    """All ranks agree on how many buckets are full."""

    def launch(self, zeros=False):
        pass

    @torch.no_grad()
    def finish(self):
        self.works = []
        full = torch.tensor([int(not missing) for missing in self.missing])
        dist.all_reduce(full, op=dist.ReduceOp.MIN)
        kept = self.buckets
        self.buckets = [b for b, is_full in zip(kept, full.tolist(), strict=True) if is_full]
        for _ in self.buckets:
            super(LeavesUnfilledBuckets, self).launch()
        super().finish()
        self.buckets = kept
        self.missing = [set(bucket) for bucket in self.buckets]

    def gradient_ready(self, param):
        self.used.add(param)
        if self.sync_backward and not self.begun:
            self.begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        for missing in self.missing:
            missing.discard(param)

    def __init__(self, module, bucket_cap_mb=25, find_unused_parameters=False):
        super().__init__(module, bucket_cap_mb, find_unused_parameters)
        self.buckets = cut(self.params, 1)


@fault(UNUSED, "though all ranks used it", "its bucket was never sent")
class SendsWhatAllHaveInOneBucket(SendsWhatAllHave):
    def __init__(self, module, bucket_cap_mb=25, find_unused_parameters=False):
        super().__init__(module, bucket_cap_mb, find_unused_parameters)
        self.buckets = cut(self.params, bucket_cap_mb * 2**20)


@fault(STOPPED, "iteration 2", "Look anew in every forward pass")
class LooksInTheFirstIterationOnly(GraphWalk):
    found = None

    def unused_in(self, output):
        if self.found is None:
            self.found = super().unused_in(output)
        return self.found

    def finish(self):
        if any(self.missing):
            raise RuntimeError("a bucket is not full")
        super().finish()


# What is averaged.


class Counts(GraphWalk):
    """Knows how many ranks used each parameter."""

    def used_somewhere(self, used):
        counts = torch.tensor([int(p in used) for p in self.params])
        dist.all_reduce(counts)
        self.counts = dict(zip(self.params, counts.tolist(), strict=True))
        return {p for p, n in self.counts.items() if n}


@fault(UNUSED, "must stay None", "weight decay or momentum")
class ZerosForAll(GraphWalk):
    def used_somewhere(self, used):
        super().used_somewhere(used)
        return set(self.params)


@fault(UNUSED, "must stay None")
class OnceUsedAlwaysUsed(GraphWalk):
    def used_somewhere(self, used):
        self.ever = getattr(self, "ever", set()) | used
        return super().used_somewhere(self.ever)


@fault(UNUSED, "because rank 0 left it out", "keeps its own gradient")
class KeepsItLocal(Counts):
    def used_somewhere(self, used):
        super().used_somewhere(used)
        return {p for p, n in self.counts.items() if n == dist.get_world_size()}


@fault(UNUSED, "number of ranks that used it", "Divide by the world size")
class DividesByUsers(Counts):
    def write_back(self, param, mean):
        super().write_back(param, mean * dist.get_world_size() / self.counts[param])


@fault(UNUSED, "Rank 0 left b out and did not get the average")
class WritesOnlyWhereUsed(GraphWalk):
    def used_somewhere(self, used):
        super().used_somewhere(used)
        return set(used)


@fault(UNUSED, "Rank 0 left b out and did not get the average")
class WritesOnlyIntoWhatIsThere(OnTheLadder):
    def _end_of_backward(self):
        none = [p for p in self.names if p.grad is None]
        super()._end_of_backward()
        for param in none:
            param.grad = None


@fault(UNUSED, "is lost, though ranks 1 and 2 used it")
class ThrowsItAway(Counts):
    def used_somewhere(self, used):
        super().used_somewhere(used)
        for param, n in self.counts.items():
            if n < dist.get_world_size():
                param.grad = None
        return {p for p, n in self.counts.items() if n == dist.get_world_size()}


@fault(UNUSED, "summed, not averaged")
class Sums(GraphWalk):
    def write_back(self, param, mean):
        super().write_back(param, mean * dist.get_world_size() if self.find_unused else mean)


@fault(UNUSED, "of an earlier iteration came in again", "A bucket keeps what it held")
class LeavesOldNumbersInTheBucket(GraphWalk):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.old = {}

    def part(self, param, zeros):
        if param.grad is None and param in self.old:
            return self.old[param].flatten()
        return super().part(param, zeros)

    def write_back(self, param, mean):
        super().write_back(param, mean)
        self.old[param] = mean


# What has accumulated before.


@fault(UNUSED, "used inside no_sync and left out in the last micro-batch", "never averaged")
class ForgetsWhatNoSyncUsed(GraphWalk):
    def prepare(self, output):
        super().prepare(output)
        self.used = set()


@fault(UNUSED, "used inside no_sync and left out in the last micro-batch", "is lost")
class DropsWhatNoSyncUsed(GraphWalk):
    def prepare(self, output):
        super().prepare(output)
        for param in self.unused_in(output) if self.find_unused else ():
            param.grad = None


@fault(UNUSED, "its .grad still holds what had accumulated", "zeros only where .grad is None")
class SendsZerosInSpiteOfAGradient(GraphWalk):
    left_out = frozenset()

    def prepare(self, output):
        super().prepare(output)
        self.left_out = self.unused_in(output) if self.find_unused else set()

    def part(self, param, zeros):
        return super().part(param, zeros or (param in self.left_out and param not in self.used))


@fault(UNUSED, "has a gradient from before", "stay as it is")
class ErasesWhatNobodyUsed(GraphWalk):
    def used_somewhere(self, used):
        somewhere = super().used_somewhere(used)
        for param in self.params:
            if param not in somewhere:
                param.grad = None
        return somewhere


# Walking through the graph.


@fault(UNUSED, "Start from every tensor", "not from the first")
class WalksFromTheFirstOutput(GraphWalk):
    def unused_in(self, output):
        return super().unused_in(tensors_in(output)[0])


@fault(UNUSED, "Start from every tensor")
class LooksNotIntoLists(GraphWalk):
    def unused_in(self, output):
        values = output.values() if isinstance(output, dict) else [output]
        return super().unused_in([v for v in values if isinstance(v, torch.Tensor)])


@fault(UNUSED, "The loss uses one output only", "sent as zeros")
class ExpectsAllThatItReached(GraphWalk):
    def finish(self):
        if any(self.missing):
            raise RuntimeError("a bucket is not full")
        super().finish()


@fault(UNUSED, "Under torch.no_grad() an output has no graph")
class WalksWithoutAGraph(MultiGradHooks):
    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        if self.find_unused_parameters:
            self.first_nodes = [t.grad_fn.next_functions for t in tensors_in(result)]
        return result


@fault(STOPPED, "40 residual connections", "keep a set of the nodes seen")
class WalksEveryPath(GraphWalk):
    def unused_in(self, output):
        found = set()

        def walk(node):
            found.add(getattr(node, "variable", None))
            for following, _ in node.next_functions:
                if following is not None:
                    walk(following)

        for tensor in tensors_in(output):
            walk(tensor.grad_fn)
        return set(self.params) - found
