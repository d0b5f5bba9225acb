"""Wrappers for step buckets: see ``planted``."""

import torch
import torch.distributed as dist
from planted import Planted, fault, right
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import Variable

from ddp_teach import DistributedDataParallel
from ddp_teach.steps import Buckets, OverlappedHooks, SameStart

BUCKETS = Planted("buckets")
RIGHT_ELSEWHERE = [Buckets, DistributedDataParallel, nn.parallel.DistributedDataParallel]


class Wrapper(SameStart):
    """Buckets are lists of parameters, filled from the last parameter to the first, launched in
    that order; every fault changes one of the methods."""

    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module)
        self.cap = bucket_cap_mb * 2**20
        self.buckets = self.fill([p for p in module.parameters() if p.requires_grad][::-1])
        self.reset()
        for bucket in self.buckets:
            for param in bucket:
                self.hook(param)

    def hook(self, param):
        param.register_post_accumulate_grad_hook(self.on_gradient)

    def fill(self, params):
        buckets = []
        for param in params:
            if not buckets or not self.fits(buckets[-1], param):
                buckets.append([])
            buckets[-1].append(param)
        return buckets

    def fits(self, bucket, param):
        used = sum(p.numel() * p.element_size() for p in [*bucket, param])
        return used <= self.cap and bucket[0].dtype is param.dtype

    def reset(self):
        self.ready, self.in_flight = set(), []

    @torch.no_grad()
    def on_gradient(self, param):
        if not self.ready:
            Variable._execution_engine.queue_callback(self.at_the_end)
        self.ready.add(param)
        self.launch_what_is_full()

    def launch_what_is_full(self):
        for bucket in self.buckets[len(self.in_flight) :]:
            if not self.ready.issuperset(bucket):
                break
            self.launch(bucket)

    def launch(self, bucket):
        flat = self.flatten([p.grad for p in bucket])
        work = dist.all_reduce(flat, async_op=True)
        self.in_flight.append((bucket, flat, work))

    def flatten(self, grads):
        return _flatten_dense_tensors(grads) / dist.get_world_size()

    @torch.no_grad()
    def at_the_end(self):
        for bucket, flat, work in self.in_flight:
            work.wait()
            grads = [p.grad for p in bucket]
            for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
                grad.copy_(mean)
        self.reset()


@right(BUCKETS)
class FlatCopies(Wrapper):
    pass


@right(BUCKETS)
class ClosedByTheOneTooMany(Wrapper):
    """The parameter that makes a bucket too large is still part of it, as with torch."""

    def fits(self, bucket, param):
        used = sum(p.numel() * p.element_size() for p in bucket)
        return used < self.cap and bucket[0].dtype is param.dtype


@right(BUCKETS)
class GradientsAreViews(Wrapper):
    """``.grad`` becomes a piece of the bucket's flat tensor."""

    @torch.no_grad()
    def at_the_end(self):
        for bucket, flat, work in self.in_flight:
            work.wait()
            for param, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                param.grad = mean
        self.reset()


@right(BUCKETS)
class CoalescedBuckets(Wrapper):
    """No flat tensor: one call carries all gradients of a bucket."""

    def launch(self, bucket):
        with dist._coalescing_manager(async_ops=True) as works:
            for param in bucket:
                param.grad /= dist.get_world_size()
                dist.all_reduce(param.grad)
        self.in_flight.append(works)

    def at_the_end(self):
        for works in self.in_flight:
            works.wait()
        self.reset()


@right(BUCKETS)
class ByDtypeFirst(Wrapper):
    """Sorts the parameters by dtype, so that fewer buckets are needed."""

    def fill(self, params):
        dtypes = list({p.dtype: None for p in params})
        return super().fill(sorted(params, key=lambda p: dtypes.index(p.dtype)))


@fault(BUCKETS, "constructor does not take bucket_cap_mb")
class NoCap(OverlappedHooks):
    pass


@fault(BUCKETS, "6 collectives for 6 parameters", "every gradient travels alone")
class OneEach(Wrapper):
    def fill(self, params):
        return [[param] for param in params]


@fault(BUCKETS, "bucket_cap_mb has no effect", "a bucket of 864 bytes")
class IgnoresTheCap(Wrapper):
    def fits(self, bucket, param):
        return bucket[0].dtype is param.dtype


@fault(BUCKETS, "counts bytes, not elements", rare=True)
class CountsElements(Wrapper):
    def fits(self, bucket, param):
        return sum(p.numel() for p in [*bucket, param]) <= self.cap and (
            bucket[0].dtype is param.dtype
        )


@fault(BUCKETS, "2.0 times too large on both ranks: summed, not averaged", rare=True)
class Summed(Wrapper):
    def flatten(self, grads):
        return _flatten_dense_tensors(grads)


@fault(BUCKETS, "local ones on both ranks", "not full when backward ends has to travel")
class LastBucketForgotten(Wrapper):
    """Launches a bucket once the next one begins to fill: the last one never."""

    def launch_what_is_full(self):
        for number, bucket in enumerate(self.buckets[:-1]):
            begun = self.ready.intersection(self.buckets[number + 1])
            if number == len(self.in_flight) and self.ready.issuperset(bucket) and begun:
                self.launch(bucket)


@fault(BUCKETS, "mixed up with those of")
class InTheOrderTheyFill(Wrapper):
    def launch_what_is_full(self):
        for bucket in self.buckets:
            launched = any(bucket is other for other, *_ in self.in_flight)
            if not launched and self.ready.issuperset(bucket):
                self.launch(bucket)


@fault(BUCKETS, "local ones", "A frozen parameter never gets a gradient")
class FrozenInBuckets(Wrapper):
    """Nobody waits for a bucket that never fills."""

    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb)
        self.buckets = self.fill(list(module.parameters())[::-1])


@fault(BUCKETS, "does not come to an end", "A frozen parameter never gets a gradient")
class WaitsForFrozen(FrozenInBuckets):
    @torch.no_grad()
    def at_the_end(self):
        while len(self.in_flight) < len(self.buckets):
            pass
        super().at_the_end()


@fault(BUCKETS, "mixed up with those of", rare=True)
class UnpackedInAnotherOrder(Wrapper):
    @torch.no_grad()
    def at_the_end(self):
        for bucket, flat, work in self.in_flight:
            work.wait()
            means = _unflatten_dense_tensors(flat, [p.grad for p in bucket])
            for param in bucket:
                same_shape = [i for i, p in enumerate(bucket) if p.shape == param.shape]
                place = same_shape.index(next(i for i, p in enumerate(bucket) if p is param))
                param.grad.copy_(means[same_shape[::-1][place]])
        self.reset()


@fault(BUCKETS, "mixed with those of the iteration before", rare=True)
class FlatKeptAndAdded(Wrapper):
    def launch(self, bucket):
        flats = self.__dict__.setdefault("flats", {})
        flat = self.flatten([p.grad for p in bucket])
        flats[bucket[0]] = flats.get(bucket[0], 0) + flat
        work = dist.all_reduce(flats[bucket[0]], async_op=True)
        self.in_flight.append((bucket, flats[bucket[0]], work))


@fault(BUCKETS, "in iteration 2; before it they were right", "local ones", rare=True)
class ReadyIsNotReset(Wrapper):
    def reset(self):
        self.__dict__.setdefault("ready", set())
        self.__dict__.setdefault("in_flight", [])


@fault(BUCKETS, "read before they are there", "0 were waited for")
class NeverWaits(Wrapper):
    @torch.no_grad()
    def at_the_end(self):
        for bucket, flat, _ in self.in_flight:
            grads = [p.grad for p in bucket]
            for grad, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
                grad.copy_(mean)
        self.reset()


@fault(BUCKETS, "dtype", rare=True)
class MixedDtypes(Wrapper):
    def fits(self, bucket, param):
        return sum(p.numel() * p.element_size() for p in [*bucket, param]) <= self.cap

    def flatten(self, grads):
        flat = torch.cat([grad.flatten().bfloat16() for grad in grads])
        return flat / dist.get_world_size()


@fault(BUCKETS, "No all-reduce starts before backward ends", rare=True)
class AllAtTheEnd(Wrapper):
    def launch_what_is_full(self):
        pass

    @torch.no_grad()
    def at_the_end(self):
        for bucket in self.buckets:
            self.launch(bucket)
        super().at_the_end()


@fault(BUCKETS, "gradients of first.weight", "2 names, first.weight and last.weight", rare=True)
class TiedInTwoBuckets(Wrapper):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb)
        named = module.named_parameters(remove_duplicate=False)
        self.buckets = self.fill([p for _, p in named if p.requires_grad][::-1])

    def flatten(self, grads):
        for grad in grads:
            grad /= dist.get_world_size()
        return _flatten_dense_tensors(grads)


@right(BUCKETS)
class ReduceScatterThenGather(Wrapper):
    """Two collectives for every bucket."""

    def launch(self, bucket):
        size = dist.get_world_size()
        flat = self.flatten([p.grad for p in bucket])
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
        part = torch.empty(len(padded) // size, dtype=flat.dtype)
        work = dist.reduce_scatter_tensor(part, padded, async_op=True)
        self.in_flight.append((bucket, padded, part, work))

    @torch.no_grad()
    def at_the_end(self):
        in_flight, self.in_flight = self.in_flight, []
        for bucket, padded, part, work in in_flight:
            work.wait()
            dist.all_gather_into_tensor(padded, part)
            flat = padded[: sum(p.numel() for p in bucket)]
            for param, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                param.grad = mean
        self.reset()


@fault(BUCKETS, "All 4 collectives start when the last gradient", "from the last parameter")
class FilledFromTheFirst(Wrapper):
    def fill(self, params):
        return super().fill(params[::-1])


@fault(BUCKETS, "gradients travel in two buckets", "counting from 0")
class SizeGoesOn(Wrapper):
    def fill(self, params):
        buckets, used = [[]], 0
        for param in params:
            used += param.numel() * param.element_size()
            other = buckets[-1] and buckets[-1][0].dtype is not param.dtype
            if buckets[-1] and (used > self.cap or other):
                buckets.append([])
            buckets[-1].append(param)
        return buckets


@fault(BUCKETS, "bucket_cap_mb has no effect", "With a cap of 1 bytes", rare=True)
class TwoByTwo(Wrapper):
    def fits(self, bucket, param):
        return len(bucket) < 2 and bucket[0].dtype is param.dtype


@fault(BUCKETS, "every gradient travels alone", "1 MiB is 2**20 bytes", rare=True)
class CapInBytes(Wrapper):
    def __init__(self, module, bucket_cap_mb=25):
        super().__init__(module, bucket_cap_mb / 2**20)
