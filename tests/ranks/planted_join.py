"""Wrappers for step join: see ``planted``. Each is a whole wrapper with one method replaced."""

from contextlib import contextmanager, nullcontext, suppress

import torch.distributed as dist
from complete_wrappers import GraphWalk, OnTheLadder, broadcast
from planted import Planted, fault, right

JOIN = Planted("join")
STOPPED = Planted("join")  # those that hang, are ended by C++, or raise on some ranks only


class InSteps(GraphWalk):
    """``join`` cut into pieces, to be replaced one by one."""

    @contextmanager
    def join(self):
        self.joining, self.steps = True, 0
        try:
            yield
            self.answer_the_others()
        finally:
            self.joining = False
        self.end_equal()

    def end_equal(self):
        broadcast([*self.module.parameters(), *self.module.buffers()], self.last_to_join())


@right(JOIN)
class LastJoinerSendsItsModelByAllReduce(InSteps):
    def end_equal(self):
        last = self.last_to_join()
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            values = tensor.detach() * (dist.get_rank() == last)
            dist.all_reduce(values)
            tensor.data.copy_(values)


@right(JOIN)
class AnnouncesOutsideToo(InSteps):
    """As torch's class does after its first join."""

    steps = 0

    @contextmanager
    def join(self):
        with super().join():
            yield
        self.joining = True


# What join() returns.


@fault(STOPPED, "has no method join")
class NoMethod(GraphWalk):
    @property
    def join(self):
        raise AttributeError("join")


@fault(STOPPED, "join() returns None")
class OnlySetsTheSwitch(GraphWalk):
    def join(self):
        self.joining = True


@fault(STOPPED, "bare generator")
class NoDecorator(GraphWalk):
    def join(self):
        yield


# Answering the ranks that still train.


@fault(STOPPED, "waits for rank 0 in collective", "Join ends at once on rank 0, out of batches")
class DoesNothing(GraphWalk):
    def join(self):
        return nullcontext()


@fault(STOPPED, "Rank 0 left join while rank 2 still had batches")
class AnswersOneStepOnly(GraphWalk):
    def answer_the_others(self):
        if self.announce(0)[0]:
            self.shadow()


@fault(STOPPED, "All ranks are out of batches, but they do not leave join together")
class NeverLeaves(GraphWalk):
    def answer_the_others(self):
        while True:
            self.shadow()

    def announce(self, active):
        return [1, 1]


@fault(STOPPED, "All ranks are out of batches, but they do not leave join together")
class LastRankDoesNotCount(InSteps):
    alone = False

    def announce(self, active):
        counts = super().announce(active)
        if active:
            self.alone = counts[0] == 1
        return counts

    def answer_the_others(self):
        if not self.alone:
            super().answer_the_others()


@fault(STOPPED, "answers fewer collectives than a step of rank 2")
class AnswersOneBucketOnly(GraphWalk):
    def shadow(self):
        self.works = []
        self.launch(zeros=True)
        self.works[0][0].wait()
        self.works = []


@fault(STOPPED, "all_reduce(2 x int64) on rank 0", "answers fewer collectives than a step")
class DoesNotAnswerWhatWasUsed(GraphWalk):
    def shadow(self):
        self.works = []
        while len(self.works) < len(self.buckets):
            self.launch(zeros=True)
        for work, _ in self.works:
            work.wait()
        self.works = []


@fault(STOPPED, "starts a broadcast (of buffers, most likely)", "does not answer")
class DoesNotAnswerBuffers(OnTheLadder):
    @contextmanager
    def join(self):
        self.in_join = True
        yield
        while self.highest(-1) >= 0:
            if self.highest(0):
                self.shadow()
        self.in_join = False


@fault(STOPPED, "one in no_sync sends no gradients")
class AnswersNoSyncAsWell(GraphWalk):
    def announce(self, active):
        active, _ = super().announce(active)
        return [active, active]


@fault(STOPPED, "epoch 2", "A rank without batches stays in join")
class WorksOnceOnly(GraphWalk):
    used = False

    def answer_the_others(self):
        if not self.used:
            super().answer_the_others()
        self.used = True


@fault(STOPPED, "On rank 1", "batch 0 of 0 in epoch 3 raised AttributeError")
class NeedsABatch(InSteps):
    """Counts steps from the first forward pass on: a rank without batches has no count."""

    def forward(self, *inputs, **kwargs):
        if self.joining:
            self.__dict__.setdefault("steps", 0)
        return super().forward(*inputs, **kwargs)

    @contextmanager
    def join(self):
        with super().join():
            del self.steps
            yield


@fault(STOPPED, "StopIteration")
class StopsAllWhenOneIsDone(GraphWalk):
    def announce(self, active):
        counts = super().announce(active)
        if active and counts[0] < dist.get_world_size():
            raise StopIteration
        return counts


# Gradients in join.


@fault(JOIN, "Divide by the world size, 3")
class DividesByThoseStillActive(GraphWalk):
    active = None

    def announce(self, active):
        self.active, synchronising = super().announce(active)
        return [self.active, synchronising]

    def write_back(self, param, mean):
        if self.joining:
            mean = mean * dist.get_world_size() / self.active
        super().write_back(param, mean)


@fault(
    JOIN, "Rank 0, out of batches, still sends something, its old gradients perhaps", "sends zeros"
)
class SendsOldGradients(GraphWalk):
    def launch(self, zeros=False):
        super().launch()


@fault(JOIN, "Inside join gradients are not averaged")
class LocalInside(GraphWalk):
    @contextmanager
    def join(self):
        with self.no_sync(), super().join():
            yield


@fault(JOIN, "Inside join gradients are summed, not averaged")
class SumsInside(GraphWalk):
    def write_back(self, param, mean):
        super().write_back(param, mean * dist.get_world_size() if self.joining else mean)


# The model at the end.


@fault(JOIN, "are missing on ranks 0 and 1", "broadcast its parameters and buffers")
class LeavesOldModels(InSteps):
    def end_equal(self):
        pass


@fault(JOIN, "all ranks have the model of rank 0, which had run out of batches")
class TakesRankZerosModel(InSteps):
    def last_to_join(self):
        return 0


@fault(JOIN, "all ranks have the model of rank 2, which had run out of batches")
class TakesTheLastRanksModel(InSteps):
    def last_to_join(self):
        return dist.get_world_size() - 1


@fault(JOIN, "have the parameters of a rank that trained to the end")
class AveragesTheModels(InSteps):
    def end_equal(self):
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.all_reduce(tensor.data)
            tensor.data /= dist.get_world_size()


@fault(JOIN, "The buffers after join are not those of a rank that trained to the end")
class ForgetsBuffers(InSteps):
    def end_equal(self):
        broadcast(self.module.parameters(), self.last_to_join())


@fault(JOIN, "where forward broadcasts buffers, take them from a rank that still trains")
class TakesBuffersFromRankZero(OnTheLadder):
    def highest(self, number):
        found = super().highest(number)
        return min(found, 0) if self.asks_for_buffers(number) else found

    def asks_for_buffers(self, number):
        self.asked = not getattr(self, "asked", False) if self.in_join else False
        return self.asked


# What join leaves behind.


@fault(JOIN, "join swallows an exception")
class CatchesEverything(InSteps):
    @contextmanager
    def join(self):
        self.joining, self.steps = True, 0
        with suppress(Exception):
            yield
        self.answer_the_others()
        self.joining = False
        self.end_equal()


@fault(JOIN, "must be as before when its block ends")
class OffAfterAnException(InSteps):
    @contextmanager
    def join(self):
        try:
            with super().join():
                yield
        except Exception:
            self.sync = False
            raise


@fault(JOIN, "Inside join gradients are not averaged")
class OffAfterJoin(InSteps):
    def end_equal(self):
        super().end_equal()
        self.sync = False


# More ways of getting it wrong.


@fault(JOIN, "Rank 0, out of batches, still sends something", "sends zeros")
class SendsOnes(GraphWalk):
    def part(self, param, zeros):
        return super().part(param, zeros) + float(zeros)


@fault(JOIN, "An exception leaves the block: let it go on")
class AnswersAfterAnException(InSteps):
    @contextmanager
    def join(self):
        self.joining, self.steps = True, 0
        try:
            yield
        finally:
            self.answer_the_others()
            self.joining = False
        self.end_equal()


@fault(STOPPED, "they have to agree on one rank that trained to the end")
class EverybodySendsItsModel(InSteps):
    def last_to_join(self):
        return dist.get_rank()
