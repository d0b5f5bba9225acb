"""DistributedDataParallel, the finished wrapper: constructor, forward, no_sync, join.

Every rank holds the same model and sees different data; after backward every rank holds the same
averaged gradients. How that is done is in the files that this one joins: ``replicas`` (the same
model on every rank), ``reducer`` and ``buckets`` (averaging during backward), ``unused``,
``uneven``.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel.scatter_gather import scatter_kwargs

from ddp_teach import arguments, uneven
from ddp_teach.buckets import Bucket, bucket_caps
from ddp_teach.comm_hook import check_hook
from ddp_teach.parameters import ModelWatch, managed_parameters
from ddp_teach.reducer import Reducer
from ddp_teach.replicas import CHUNK_BYTES, BufferSync, broadcast_states, check_same_model
from ddp_teach.torch_names import TorchNames


class DistributedDataParallel(TorchNames, nn.Module, Joinable):
    """Trains ``module`` on several ranks as one: a drop-in for torch's class of the same name.

    Arguments, defaults and errors are those of ``torch.nn.parallel.DistributedDataParallel``,
    except: without a process group it runs as a world of one, a module without parameters that
    require grad is passed through, and ``mixed_precision``, ``delay_all_reduce_named_params`` and
    ``param_to_hook_all_reduce`` raise ``NotImplementedError``.
    """

    # fmt: off  (torch's order; a line for each would push the body out of sight)
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: object | None = None,
        device_mesh: dist.DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ):
        # fmt: on
        super().__init__()
        Joinable.__init__(self)
        arguments.refuse_unsupported(
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
        )
        arguments.check_bucket_sizes(bucket_cap_mb, bucket_cap_mb_list)
        arguments.warn_if_deprecated(broadcast_buffers, check_reduction)
        self.process_group = arguments.find_process_group(process_group, device_mesh)
        self.device_mesh, self.dim, self.module = device_mesh, dim, module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.bucket_caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap = max(self.bucket_caps)
        self.bucket_bytes_cap_list = self.bucket_caps if bucket_cap_mb_list else []
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy, self.broadcast_bucket_size = batched_grad_copy, CHUNK_BYTES
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.divide_by_initial_world_size = True
        self.forward_sync_buffers, sync_buffers = arguments.buffer_flags(
            broadcast_buffers, forward_sync_buffers
        )
        params = self._check_module(device_ids, output_device)
        if init_sync and self.process_group is not None:
            self._start_equal(params, sync_buffers)
        self._attach()

    def _check_module(self, device_ids: Sequence | None, output_device: object) -> dict:
        params = {n: p for n, p, _ in self._managed()}
        arguments.check_parameters(self.module, list(params.values()))
        self.device = next((p.device for p in params.values()), torch.device("cpu"))
        self.device_ids, self.output_device = arguments.find_devices(
            list(params.values()), device_ids, output_device
        )
        return params

    def _managed(self) -> Iterator[tuple[str, nn.Parameter, bool]]:
        return managed_parameters(self.module, self.parameters_to_ignore)

    def _start_equal(self, params: dict[str, nn.Parameter], sync_buffers: bool) -> None:
        check_same_model(list(params.values()), list(params), self.process_group, self.device)
        broadcast_states(
            self.module, self.process_group, self.parameters_to_ignore, buffers=sync_buffers
        )

    def _attach(self) -> None:
        """Put hooks on the parameters; the wrapper's end takes them off again."""
        self.reducer = None
        managed = list(self._managed())
        if self.process_group is None or not managed:
            return
        names, params, sparse = zip(*managed, strict=True)
        self.buffer_sync = BufferSync(self.module, self.process_group, self.parameters_to_ignore)
        self.reducer = Reducer(
            params,
            names,
            sparse,
            self.process_group,
            self.bucket_caps,
            caps_at_once=bool(self.bucket_bytes_cap_list),
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            skip_all_reduce_unused_params=self.skip_all_reduce_unused_params,
            batched_grad_copy=self.batched_grad_copy,
            check_model=ModelWatch(self.module, self.parameters_to_ignore),
        )
        weakref.finalize(self, self.reducer.remove_hooks).atexit = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module on ``inputs`` and ``kwargs`` and return exactly what it returns.

        What differs from calling the module: a backward pass through the result averages the
        gradients over all ranks, unless this forward pass ran inside ``no_sync``.
        """
        if self.reducer is None:
            return self.module(*inputs, **kwargs)
        self.reducer.before_forward()
        joining = self._join_config.enable
        if joining:
            uneven.announce(self)
        if self.will_sync_module_buffers():
            self.buffer_sync(uneven.agree_on_rank(self, True) if joining else 0)
        if joining:
            uneven.agree_to_synchronise(self, self.require_backward_grad_sync)
        if self.device_ids:
            inputs, kwargs = self._on_device(inputs, kwargs)
        output = self.module(*inputs, **kwargs)
        with_grad = torch.is_grad_enabled()
        synchronise = with_grad and self.require_backward_grad_sync
        if self.require_forward_param_sync is not synchronise:
            self.require_forward_param_sync = synchronise
        if with_grad:
            tensors = [output] if isinstance(output, Tensor) else tensors_in(output)
            self.reducer.after_forward(tensors, synchronise)
        return output

    def _on_device(self, inputs: tuple, kwargs: dict) -> tuple[tuple, dict]:
        moved, moved_kwargs = scatter_kwargs(inputs, kwargs, self.device_ids, dim=self.dim)
        return moved[0], moved_kwargs[0]

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass starts by copying buffers from one rank to all."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and bool(self.buffer_sync.places)
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes in this context leave their gradients local, to be accumulated; the first
        backward through a forward outside averages all that has accumulated."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train with different numbers of inputs per rank: ranks that are done answer the others.

        Gradients are divided by the world size, or, with ``divide_by_initial_world_size=False``, by
        the number of ranks that still have inputs. ``throw_on_early_termination`` raises
        ``RuntimeError`` on all ranks once the first is done.
        """
        if self.reducer is None:
            yield
            return
        try:
            with Join(
                [self],
                enable,
                throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
            ):
                yield
        finally:
            Joinable.__init__(self)  # outside of the context no step is announced
            self.reducer.divisor = dist.get_world_size(self.process_group)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank that is done does for the others; for
        ``torch.distributed.algorithms.join``."""
        return uneven.Shadow(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self) -> torch.device:
        """Where tensors for the join context's own collectives live."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group over which the join context counts ranks."""
        return self.process_group

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Let ``hook(state, bucket)`` average each bucket instead of an all-reduce; it returns a
        ``torch.futures.Future`` of the new contents. Can be called once."""
        check_hook(hook)
        if self.reducer is None:
            return
        if self.reducer.comm_hook is not None:
            raise RuntimeError(
                "register_comm_hook or register_builtin_comm_hook can only be called once."
            )
        self.reducer.comm_hook = (state, hook)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets in launch order, as they are now (they change once, after the first
        backward)."""
        return [] if self.reducer is None else self.reducer.buckets

    @property
    def broadcast_buffers(self) -> bool:
        """torch's older name for ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def extra_repr(self) -> str:
        if self.process_group is None:
            return "world of one: no process group, gradients stay as they are"
        world_size = dist.get_world_size(self.process_group)
        if self.reducer is None:
            return f"world size {world_size}, no parameters to synchronise"
        lines = [f"world size {world_size}, {len(self.buckets)} bucket(s) in launch order:"]
        return "\n".join([*lines, *(f"  {bucket!r}" for bucket in self.buckets)])

    # Copies: everything but what belongs to this process, which is made anew.

    def _copyable(self) -> dict[str, Any]:
        ours = ("process_group", "device_mesh", "reducer", "buffer_sync")
        return {k: v for k, v in self.__dict__.items() if k not in ours}

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None and self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. Pickle `.module` or its state_dict instead."
            )
        return self._copyable()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.device_mesh = None
        self.process_group = arguments.find_process_group(None, None)
        self._attach()

    def __deepcopy__(self, memo: dict) -> "DistributedDataParallel":
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self._copyable(), memo))
        twin.process_group, twin.device_mesh = self.process_group, self.device_mesh
        twin._attach()
        return twin


def tensors_in(output: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, dicts and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors_in(value)
    elif is_dataclass(output):
        for field in fields(output):
            yield from tensors_in(getattr(output, field.name))
