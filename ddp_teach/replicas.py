"""The same model on every rank: compare the models, then copy one rank's numbers to all.

Two ranks whose models differ would not crash: they would add up unrelated numbers. So every rank
tells what its parameters look like before the first value is sent.
"""

import hashlib
import weakref
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as any_module

from ddp_teach.buckets import assign_buckets, copy_all

CHUNK_BYTES = 250 * 1024 * 1024  # so that the copy which is sent stays small beside the model


def named_states(
    module: nn.Module, ignored: Collection[str], buffers: bool
) -> list[tuple[str, Tensor]]:
    """Name and tensor of all parameters, frozen ones too, and ``buffers``, if asked for; names in
    ``ignored`` are left out."""
    named = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
    return [(name, tensor) for name, tensor in named if name not in ignored]


def check_same_model(
    named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise the same ``RuntimeError`` on every rank if the ranks' tensors differ in number, name,
    shape, dtype, strides or whether they are trained, or come in another order; or if one can't be
    copied from rank to rank. ``device`` suits the group's backend.
    """
    mine = [
        f"{name}: shape {list(t.shape)}, {t.dtype}, "
        + (f"strides {t.stride()}" if t.requires_grad else f"not trained {why_not_copied(t)}")
        for name, t in named
    ]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()[:8]
    number = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
    numbers = [torch.empty_like(number) for _ in range(dist.get_world_size(group))]
    dist.all_gather(numbers, number, group=group)
    if any(n != number for n in numbers):
        models = [mine] * len(numbers)
        dist.all_gather_object(models, mine, group=group)
        cure = "Build the same model on every rank, in the same order."
        raise RuntimeError(f"The ranks hold different models: {first_difference(models)}. {cure}")
    for name, tensor in named:
        if reason := why_not_copied(tensor):
            raise RuntimeError(
                f"{name} can't be copied from rank to rank: it is {reason}. Put a dense clone of "
                "it in its place, or name it in the module's _ddp_params_and_buffers_to_ignore."
            )


def why_not_copied(tensor: Tensor) -> str:
    """What keeps one rank's values from being written into the ``tensor`` of another; or ""."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return "quantized" if tensor.is_quantized else "sparse"
    # 1 for sure; 2, "too hard to say", may have been written to without an error
    return "expanded" if torch._debug_has_internal_overlap(tensor) == 1 else ""


def first_difference(models: Sequence[Sequence[str]]) -> str:
    """Where the first rank that differs from rank 0 does so; ``models[r]`` has one line for each
    parameter and buffer of rank r."""
    for rank, model in enumerate(models):
        if len(model) != len(models[0]):
            return f"rank 0 has {len(models[0])} parameters and buffers, rank {rank} {len(model)}"
        for i, (theirs, ours) in enumerate(zip(models[0], model, strict=True)):
            if theirs != ours:
                return f"parameter {i} is ({theirs}) on rank 0, ({ours}) on rank {rank}"
    return "nowhere"


class FlatBytes:
    """Room for copies of ``tensors`` (any dtypes, one device) in one flat tensor of bytes, so that
    one broadcast carries them all."""

    @torch.inference_mode(False)  # a forward pass in that mode may be the first, not the last
    def __init__(self, tensors: Sequence[Tensor]):
        sizes = [t.numel() * t.element_size() for t in tensors]
        self.flat = torch.empty(sum(sizes), dtype=torch.uint8, device=tensors[0].device)
        # the widest dtypes first, so that each part starts where its dtype may
        order = sorted(range(len(tensors)), key=lambda k: -tensors[k].element_size())
        parts = dict(zip(order, self.flat.split([sizes[k] for k in order]), strict=True))
        self.views = [parts[k].view(t.dtype).view(t.shape) for k, t in enumerate(tensors)]
        self.work: dist.Work | None = None

    def broadcast(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, src: int) -> None:
        """Overwrite ``tensors`` with those of rank ``src``, which does not wait for the others."""
        if self.work is not None:
            self.work.wait()
        if sends := dist.get_rank(group) == src:
            copy_all(self.views, tensors)
        self.work = dist.broadcast(self.flat, group=group, group_src=src, async_op=True)
        if not sends:
            self.work.wait()
            # .data: the values change, but not the version that autograd compares in backward;
            # a forward pass whose backward is still to come may have saved this tensor
            copy_all([t.data for t in tensors], self.views)


def broadcast_states(
    module: nn.Module,
    group: dist.ProcessGroup,
    ignored: Collection[str] = (),
    *,
    src: int = 0,
    buffers: bool = True,
) -> None:
    """Overwrite the parameters (frozen ones too) and buffers of ``module`` with those of rank
    ``src`` of ``group``; names in ``ignored`` are left alone."""
    states = [tensor for _, tensor in named_states(module, ignored, buffers)]
    with torch.no_grad():
        for places in assign_buckets(states, [CHUNK_BYTES]):
            chunk = [states[k] for k in places]
            room = FlatBytes(chunk)
            room.broadcast(chunk, group, src)
            room.work.wait()


class BufferSync:
    """Called before a forward pass: gives every rank the buffers of rank ``src`` (the running means
    of a batch norm, say). Names in ``ignored`` are left alone.

    Buffers are looked up afresh, because a forward pass may put a new tensor in a buffer's place.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, ignored: Collection[str]):
        self.module, self.group, self.ignored = module, group, ignored
        self.layout, self.rooms = None, []
        self._look()
        in_use.add(self)

    def _look(self) -> None:
        # named_buffers() would say the same, but walks the whole model before every forward pass
        self.outdated = False
        self.places = [
            (owner._buffers, name)
            for prefix, owner in self.module.named_modules()
            for name, _ in owner._buffers.items()
            if f"{prefix}.{name}".lstrip(".") not in self.ignored
        ]

    def finds_any(self) -> bool:
        """Whether there are buffers to synchronise; sees those that were registered only now."""
        if self.outdated:
            self._look()
        return bool(self.places)

    def __call__(self, src: int = 0) -> None:
        found = (registry[name] for registry, name in self.places if name in registry)
        tensors = [buffer for buffer in found if buffer is not None]
        devices = dict.fromkeys(t.device for t in tensors)
        per_device = [[t for t in tensors if t.device == d] for d in devices]
        layout = [(t.shape, t.dtype, t.device) for t in tensors]
        if layout != self.layout:
            self.layout, self.rooms = layout, [FlatBytes(some) for some in per_device]
        with torch.no_grad():
            for room, some in zip(self.rooms, per_device, strict=True):
                room.broadcast(some, self.group, src)


in_use: weakref.WeakSet[BufferSync] = weakref.WeakSet()


def note_registration(_module: nn.Module, _name: str, _new: object) -> None:
    """Have all look afresh: some module, be it one of theirs or not, got a buffer or a child."""
    for sync in in_use:
        sync.outdated = True


any_module.register_module_buffer_registration_hook(note_registration)
any_module.register_module_module_registration_hook(note_registration)
