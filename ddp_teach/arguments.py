"""What the constructor accepts: torch's arguments, torch's checks, and torch's error types."""

import os
import warnings
from collections.abc import Sequence
from multiprocessing import parent_process

import torch
import torch.distributed as dist
from torch import nn

FORWARD_SYNC_BUFFERS_HINT = (
    "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; note that "
    "`forward_sync_buffers=False` still copies rank 0's buffers when the model is wrapped, which "
    "`broadcast_buffers=False` does not."
)


def refuse_unsupported(**arguments: object) -> None:
    """Raise ``NotImplementedError`` for an argument that would have to be ignored."""
    own_module = "give these parameters a module of their own and wrap that"
    instead = {
        "delay_all_reduce_named_params": own_module,
        "param_to_hook_all_reduce": own_module,
        "mixed_precision": "use torch.autocast around the forward pass",
    }
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported; {instead[name]}.")


def find_process_group(
    process_group: dist.ProcessGroup | None, device_mesh: dist.DeviceMesh | None
) -> dist.ProcessGroup | None:
    """The group to synchronise over, or ``None`` for a world of one: no group was made at all.

    Raises ``RuntimeError`` for a mesh that cannot be used, and ``ValueError`` where there is no
    group although ``WORLD_SIZE`` says that there are other ranks.
    """
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        return process_group
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdecimal() and int(world_size) > 1:
        raise ValueError(
            f"WORLD_SIZE is {world_size}, but the default process group has not been initialized, "
            "so gradients could not be averaged. Call torch.distributed.init_process_group first."
        )
    if parent_process() is not None:
        warnings.warn(
            "DistributedDataParallel in a child process without a process group trains alone: call "
            "torch.distributed.init_process_group first if there are other ranks.",
            stacklevel=3,
        )
    return None


def check_parameters(module: nn.Module, params: Sequence[nn.Parameter]) -> None:
    """Raise ``RuntimeError`` for a module that can't be wrapped as it is, ``ValueError`` for one
    whose parameters lie on several kinds of devices."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}.")
    if not params and type(module).forward is nn.Module.forward:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module has neither a parameter that "
            "requires a gradient nor a forward method."
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in params):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
            "Run a dummy forward pass to correctly initialize the modules."
        )
    kinds = {p.device.type for p in params}
    if len(kinds) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input "
            f"module parameters locate in {kinds}."
        )
    if "cpu" in kinds and any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


def find_devices(
    params: Sequence[nn.Parameter], device_ids: Sequence | None, output_device: object
) -> tuple[list[int] | None, int | None]:
    """``device_ids`` and ``output_device`` as indices, ``None`` for CPU and multi-device modules.

    Raises ``ValueError`` for more than one device, or for any where the module itself decides.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    devices = {p.device for p in params}
    on_cpu = any(d.type == "cpu" for d in devices)
    if device_ids and len(devices) == 1 and not on_cpu:
        ids = [torch._utils._get_device_index(d, True) for d in device_ids]
        output = ids[0] if output_device is None else output_device
        return ids, torch._utils._get_device_index(output, True)
    if device_ids or output_device:
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            f"single-device GPU modules, but got device_ids {device_ids}, output_device "
            f"{output_device}, and module parameters {devices}. Leave them out."
        )
    return None, None


def warn_if_deprecated(broadcast_buffers: bool | None, check_reduction: bool) -> None:
    """Warn (``FutureWarning``) about arguments that torch has replaced."""
    if broadcast_buffers is not None:
        warnings.warn(FORWARD_SYNC_BUFFERS_HINT, FutureWarning, stacklevel=3)
    if check_reduction:
        message = "The `check_reduction` argument is deprecated and does nothing; leave it out."
        warnings.warn(message, FutureWarning, stacklevel=3)


def buffer_flags(broadcast: bool | None, forward_sync: bool | None) -> tuple[bool, bool]:
    """Whether to copy rank 0's buffers before each forward pass, and whether at the start."""
    if forward_sync is not None:
        return forward_sync, True
    return (True, True) if broadcast is None else (broadcast, broadcast)


def check_bucket_sizes(cap_mb: float | None, cap_mb_list: Sequence[float] | None) -> None:
    """Raise ``ValueError`` for a bucket size that is not a positive number of MiB."""
    for name, sizes in (("bucket_cap_mb", [cap_mb]), ("bucket_cap_mb_list", cap_mb_list or [])):
        for size in sizes:
            if size is not None and not (isinstance(size, int | float) and size > 0):
                raise ValueError(f"{name} must be a positive number of MiB, got {size!r}.")
