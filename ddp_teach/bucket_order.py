"""Which buckets there are, in launch order: cut in some order first, then in the one that was seen.

A bucket can travel when its last gradient is there. So gradients that become ready one after the
other belong into one bucket, and backward itself shows which these are. Every rank must cut alike:
rank 0 decides.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_teach.buckets import Bucket, assign_buckets
from ddp_teach.special_buckets import GradientBucket, SparseBucket


class BucketOrder:
    """Makes the buckets of ``managed`` (name, parameter, whether its gradient is sparse), of at
    most ``caps`` bytes; with ``as_view`` the gradients lie in them."""

    def __init__(
        self,
        managed: Sequence[tuple[str, Tensor, bool]],
        group: dist.ProcessGroup,
        caps: Sequence[int],
        as_view: bool,
    ):
        self.names, self.params, self.sparse = zip(*managed, strict=True)
        self.group, self.caps, self.as_view = group, caps, as_view

    def first(self, cut: bool) -> list[Bucket]:
        """Buckets for a backward pass of which nothing is known: from the last parameter to the
        first, cut by size, or else (as torch does then) one for each dtype."""
        assigned = assign_buckets(self.params, self.caps if cut else None, self.sparse)
        return self._make(sorted(assigned, key=min, reverse=True))

    def learned(self, ready: Sequence[int]) -> list[Bucket]:
        """Buckets in the order in which rank 0's gradients became ``ready``; a collective."""
        order = dict.fromkeys([*ready, *range(len(self.params))])
        agreed = torch.tensor(list(order), device=self.params[0].device)
        dist.broadcast(agreed, group=self.group, group_src=0)
        order = agreed.tolist()
        params, sparse = [self.params[i] for i in order], [self.sparse[i] for i in order]
        assigned = assign_buckets(params, self.caps, sparse)
        return self._make([[order[k] for k in places] for places in assigned])

    def again(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """The same for parameters that were moved or converted: one bucket for each dtype."""
        parts = ((b.indices, ks) for b in buckets for ks in assign_buckets(b.params, None))
        return self._make([[indices[k] for k in ks] for indices, ks in parts])

    def _make(self, assigned: Sequence[Sequence[int]]) -> list[Bucket]:
        usual = GradientBucket if self.as_view else Bucket
        buckets = []
        for indices in assigned:
            kind = SparseBucket if self.sparse[indices[0]] else usual
            params, names = [self.params[i] for i in indices], [self.names[i] for i in indices]
            buckets.append(kind(indices, params, names))
        return buckets
