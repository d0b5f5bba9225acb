"""The same model on every rank: compare the models, then copy rank 0's numbers to all.

Two ranks whose models differ would not crash: they would add up unrelated numbers. So every rank
tells what its parameters look like before the first value is sent.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

CHUNK_BYTES = 250 * 1024 * 1024  # so that the copy which is sent stays small beside the model


def check_same_model(
    params: Sequence[Tensor], names: Sequence[str], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Raise the same ``RuntimeError`` on every rank if the ranks' parameters differ in number,
    name, shape, dtype, or memory layout, or come in another order. ``device`` is where the backend
    of ``group`` takes its tensors."""
    mine = [
        f"{name} (shape {tuple(p.shape)}, {str(p.dtype).removeprefix('torch.')}, "
        f"strides {p.stride()})"
        for name, p in zip(names, params, strict=True)
    ]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()[:8]
    number = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
    world_size = dist.get_world_size(group)
    numbers = [torch.empty_like(number) for _ in range(world_size)]
    dist.all_gather(numbers, number, group=group)
    if all(torch.equal(n, number) for n in numbers):
        return
    models: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(models, mine, group=group)
    raise RuntimeError(f"The ranks hold different models. {first_difference(models)}")


def first_difference(models: Sequence[Sequence[str]]) -> str:
    """Say in a sentence where the first rank that differs from rank 0 does so; ``models[r]`` holds
    one line per parameter of rank r."""
    for rank, model in enumerate(models):
        if len(model) != len(models[0]):
            return (
                f"Rank 0 has {len(models[0])} parameters and rank {rank} has {len(model)}; "
                "build the same model on every rank."
            )
        for i, (theirs, ours) in enumerate(zip(models[0], model, strict=True)):
            if theirs != ours:
                return (
                    f"Parameter {i} is {theirs} on rank 0 but {ours} on rank {rank}; build the "
                    "same model on every rank, in the same order."
                )
    raise ValueError("All models are the same.")


def broadcast_states(
    module: nn.Module,
    group: dist.ProcessGroup,
    ignored: Sequence[str] = (),
    *,
    src: int = 0,
    buffers: bool = True,
) -> None:
    """Overwrite the parameters (frozen ones too) and buffers of ``module`` with those of rank
    ``src`` of ``group``; names in ``ignored`` are left alone."""
    states = [p for n, p in module.named_parameters() if n not in ignored]
    if buffers:
        states += [b for n, b in module.named_buffers() if n not in ignored]
    broadcast_tensors([t.detach() for t in states], group, src)


def broadcast_tensors(tensors: Sequence[Tensor], group: dist.ProcessGroup, src: int = 0) -> None:
    """Overwrite ``tensors`` (any shapes, dtypes, devices) with those of rank ``src`` of ``group``.

    They travel as bytes, so that one broadcast carries several dtypes.
    """
    chunk: list[Tensor] = []
    for tensor in sorted(tensors, key=lambda t: str(t.device)):
        too_long = sum(t.numel() * t.element_size() for t in chunk) > CHUNK_BYTES
        if chunk and (too_long or chunk[0].device != tensor.device):
            _broadcast_chunk(chunk, group, src)
            chunk = []
        chunk.append(tensor)
    if chunk:
        _broadcast_chunk(chunk, group, src)


def _broadcast_chunk(tensors: Sequence[Tensor], group: dist.ProcessGroup, src: int) -> None:
    flat = torch.cat([t.contiguous().reshape(-1).view(torch.uint8) for t in tensors])
    dist.broadcast(flat, group=group, group_src=src)
    if dist.get_rank(group) == src:
        return
    sizes = [t.numel() * t.element_size() for t in tensors]
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        # a copy of its own, because the bytes of a part may not lie where its dtype must start
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


class BufferSync:
    """Gives every rank the buffers of one rank (running means of a batch norm, say).

    Buffers are looked up afresh each time, because a forward pass may put a new tensor in a
    buffer's place. ``ignored`` holds names of buffers to leave alone.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, ignored: Sequence[str] = ()):
        self.group = group
        # named_buffers() would say the same, but walks the whole model before every forward pass
        self.places = [
            (owner._buffers, name)
            for prefix, owner in module.named_modules()
            for name in owner._buffers
            if f"{prefix}.{name}" not in ignored and (prefix or name not in ignored)
        ]

    def tensors(self) -> list[Tensor]:
        """The buffers as they are now."""
        return [b for registry, name in self.places if (b := registry.get(name)) is not None]

    def __call__(self, src: int = 0) -> None:
        # .data: the values change, but not the version that autograd compares in backward; another
        # forward pass whose backward is still to come may have saved this buffer
        broadcast_tensors([b.data for b in self.tensors()], self.group, src)
