"""What the constructor accepts: torch's arguments, torch's checks, and torch's error types."""

import math
import multiprocessing
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

UNSUPPORTED = {
    "delay_all_reduce_named_params": "give those parameters a module of their own, and wrap that",
    "param_to_hook_all_reduce": "give those parameters a module of their own, and wrap that",
    "mixed_precision": "use torch.autocast around the forward pass",
}
DEPRECATED = {
    "broadcast_buffers": "Use `forward_sync_buffers` instead; unlike `broadcast_buffers=False` it "
    "still copies rank 0's buffers once, when the model is wrapped.",
    "check_reduction": "It does nothing; leave it out.",
}

FLAGS = (
    *("init_sync", "forward_sync_buffers", "broadcast_buffers", "find_unused_parameters"),
    *("gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params"),
    "batched_grad_copy",
)


def check(given: dict[str, Any]) -> None:
    """Look at the arguments that no other function here looks at.

    Raises ``NotImplementedError`` for one that would have to be ignored, ``TypeError`` or
    ``ValueError`` for a wrong value; warns (``FutureWarning``) about deprecated ones.
    """
    for name, instead in UNSUPPORTED.items():
        if given[name] is not None:
            raise NotImplementedError(f"{name} is not supported; {instead}.")
    for name, instead in DEPRECATED.items():
        if given[name] not in (None, False) or given[name] is False and name == "broadcast_buffers":
            warnings.warn(f"`{name}` is deprecated. {instead}", FutureWarning, stacklevel=3)
    if not isinstance(given["module"], nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {given['module']!r}.")
    if isinstance(given["bucket_cap_mb_list"], str | int | float):
        what = given["bucket_cap_mb_list"]
        raise TypeError(f"bucket_cap_mb_list must be a list of bucket sizes, got {what!r}.")
    sizes = {"bucket_cap_mb": [given["bucket_cap_mb"]]}
    sizes["bucket_cap_mb_list"] = given["bucket_cap_mb_list"] or []
    for name, size in ((name, size) for name, some in sizes.items() for size in some):
        if size is not None and not (isinstance(size, int | float) and 0 < size < math.inf):
            must = "a bucket size must be a positive number of MiB"
            raise ValueError(f"{name}: {must}, got {size!r}.")
    for name in FLAGS:  # "False", from a command line, would count as true
        if isinstance(given[name], str):
            raise TypeError(f"{name} must be True or False, got {given[name]!r}.")
    kinds = {"process_group": dist.ProcessGroup, "device_mesh": DeviceMesh}
    for name, kind in kinds.items():
        if not isinstance(given[name], kind | None):
            raise TypeError(f"{name} must be a {kind.__name__}, got {given[name]!r}.")


def find_process_group(
    group: dist.ProcessGroup | None, mesh: DeviceMesh | None
) -> dist.ProcessGroup | None:
    """The group to synchronise over, or ``None`` for a world of one: no group was made at all.

    Raises ``RuntimeError`` for a mesh that cannot be used, and ``ValueError`` where there is no
    group although ``WORLD_SIZE`` says that there are other ranks.
    """
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is not None and mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    if mesh is not None:
        return mesh.get_group(mesh_dim=0)
    if group is not None or (dist.is_available() and dist.is_initialized()):
        return group or dist.group.WORLD
    cure = "Call torch.distributed.init_process_group before wrapping the model."
    if os.environ.get("WORLD_SIZE", "1") not in ("1", ""):
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the default process group has not been "
            f"initialized, so gradients would stay local. {cure}"
        )
    if multiprocessing.parent_process() is not None:
        warnings.warn(f"Without a process group this process trains alone. {cure}", stacklevel=3)
    return None


def check_parameters(module: nn.Module, params: Sequence[nn.Parameter]) -> torch.device:
    """The device of ``params`` (the CPU if there are none); raises ``RuntimeError``,
    ``ValueError`` or ``NotImplementedError`` for a module that can't be wrapped as it is."""
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
    if any(hasattr(p, "placements") for p in params):  # of a DTensor; importing that class is slow
        raise NotImplementedError(
            "Parameters that are spread over several ranks (DTensor, from parallelize_module) are "
            "not supported; use torch.distributed.fsdp.fully_shard, with a mesh of two dimensions."
        )
    kinds = {p.device.type for p in params} or {"cpu"}
    if len(kinds) > 1:
        raise ValueError(f"Parameters must be on the same type of devices, but locate in {kinds}.")
    if "cpu" in kinds and any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")
    return params[0].device if params else torch.device("cpu")


def check_devices(
    params: Sequence[nn.Parameter], device_ids: Sequence | None, output_device: object
) -> None:
    """Raise ``ValueError`` for more than one device id, or for any where the module decides."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, got {device_ids}."
        )
    devices = {p.device for p in params}
    if (device_ids or output_device) and (len(devices) != 1 or devices.pop().type == "cpu"):
        raise ValueError(
            "device_ids and output_device only work with a module on a single GPU, but got "
            f"device_ids {device_ids} and output_device {output_device}; leave them out."
        )
