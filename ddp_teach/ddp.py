"""DistributedDataParallel, the finished wrapper: constructor, forward, no_sync, join.

Every rank holds the same model and sees different data; after backward every rank holds the same
averaged gradients. How that is done is in the files that this one joins: ``replicas`` (the same
model on every rank), ``reducer`` and ``buckets`` (averaging during backward), ``uneven`` (join).
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.scatter_gather import scatter_kwargs

from ddp_teach import arguments, uneven
from ddp_teach.buckets import Bucket, bucket_caps
from ddp_teach.comm_hook import check_hook, run_hook
from ddp_teach.parameters import ModelWatch, Outputs, managed_parameters
from ddp_teach.reducer import Reducer
from ddp_teach.replicas import BufferSync, broadcast_states, check_same_model, named_states
from ddp_teach.torch_names import TorchNames


class DistributedDataParallel(TorchNames, nn.Module, Joinable):
    """Trains ``module`` on several ranks as one: a drop-in for torch's class of the same name.

    Arguments, defaults and errors are those of ``torch.nn.parallel.DistributedDataParallel``,
    except: without a process group it runs as a world of one, a module without parameters that
    require grad is passed through, and ``mixed_precision``, ``delay_all_reduce_named_params`` and
    ``param_to_hook_all_reduce`` raise ``NotImplementedError``.
    """

    require_backward_grad_sync = True  # whether backward through the next forward pass averages
    require_forward_param_sync = True  # whether backward through the last one does

    def __init__(
        self, module: nn.Module, device_ids: Sequence | None = None,
        output_device: int | torch.device | None = None, dim: int = 0,
        broadcast_buffers: bool | None = None, init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None, bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False, check_reduction: bool = False,
        gradient_as_bucket_view: bool = False, static_graph: bool = False,
        delay_all_reduce_named_params: Sequence | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None, mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None, skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None, batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ):  # fmt: skip
        arguments.check(locals())
        super().__init__()
        Joinable.__init__(self)
        self.module, self.dim, self.device_mesh = module, dim, device_mesh
        self.process_group = arguments.find_process_group(process_group, device_mesh)
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.bucket_caps = bucket_caps(bucket_cap_mb, bucket_cap_mb_list)
        self.bucket_bytes_cap_list = self.bucket_caps if bucket_cap_mb_list else []
        flags = (forward_sync_buffers, broadcast_buffers, True)
        self.forward_sync_buffers = next(flag for flag in flags if flag is not None)
        self._place(device_ids, output_device)
        if init_sync and self.process_group is not None:
            self._start_equal(forward_sync_buffers is not None or self.forward_sync_buffers)
        self._attach()

    def _place(self, device_ids: Sequence | None, output_device: Any) -> None:
        self.parameters_to_ignore = getattr(self.module, "_ddp_params_and_buffers_to_ignore", [])
        params = [p for _, p, _ in managed_parameters(self.module, self.parameters_to_ignore)]
        self.device = arguments.check_parameters(self.module, params)
        arguments.check_devices(params, device_ids, output_device)
        ids = [torch.device(d).index for d in device_ids or ()]  # an int means an accelerator
        self.device_ids = ids or None
        self.output_device = ids[0] if ids and output_device is None else output_device

    def _start_equal(self, sync_buffers: bool) -> None:
        group, ignored = self.process_group, self.parameters_to_ignore
        check_same_model(named_states(self.module, ignored, sync_buffers), group, self.device)
        broadcast_states(self.module, group, ignored, buffers=sync_buffers)

    def _attach(self) -> None:
        """Put hooks on the parameters; the end of the wrapper takes them off again."""
        managed = list(managed_parameters(self.module, self.parameters_to_ignore))
        self.reducer = self.buffer_sync = None
        if self.process_group is not None and managed:
            group, ignored = self.process_group, self.parameters_to_ignore
            self._watch = ModelWatch(self._modules, ignored)
            self.buffer_sync = BufferSync(self.module, group, ignored)
            self._outputs = Outputs(self.module)
            watch = weakref.ref(self._watch)  # the reducer, held by hooks, must not hold the model
            self.reducer = Reducer(managed, group, self.bucket_caps, self, watch)
            weakref.finalize(self, self.reducer.remove_hooks).atexit = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module on ``inputs`` and ``kwargs`` and return exactly what it returns.

        What differs from calling the module: a backward pass through the result averages the
        gradients over all ranks, unless this forward pass ran inside ``no_sync``.
        """
        module = self._modules["module"]  # `self.module` looks everywhere else first
        if self.reducer is None:
            return module(*inputs, **kwargs)
        self.reducer.before_forward()
        joining = self._join_config.enable
        if joining:
            uneven.announce(self)
        self.reducer.complaint.raise_if_filed()  # now: ranks that have joined may have one too
        if self.will_sync_module_buffers():
            rank = dist.get_rank(self.process_group)
            self.buffer_sync(uneven.highest(self, rank) if joining else 0)
        if joining:
            uneven.highest(self, int(self.require_backward_grad_sync and torch.is_grad_enabled()))
        if self.device_ids:
            (inputs,), (kwargs,) = scatter_kwargs(inputs, kwargs, self.device_ids, dim=self.dim)
        output = module(*inputs, **kwargs)
        with_grad = torch.is_grad_enabled()
        synchronise = with_grad and self.require_backward_grad_sync
        if self.require_forward_param_sync is not synchronise:  # setting it is slow in an nn.Module
            self.require_forward_param_sync = synchronise
        if with_grad:
            self.reducer.after_forward(self._outputs(output), synchronise)
        return output

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass starts by copying buffers from one rank to all."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and self.buffer_sync.finds_any()
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
        how = {"divide_by_initial_world_size": divide_by_initial_world_size}
        try:
            with Join([self], enable, throw_on_early_termination, **how):
                yield
        finally:
            Joinable.__init__(self)  # outside of this context no step is announced
            self.reducer.queue.divisor = dist.get_world_size(self.process_group)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank that is done does for the others; torch's ``Join`` calls it."""
        return uneven.Shadow(self, kwargs.get("divide_by_initial_world_size", True))

    join_device = property(attrgetter("device"), doc="Where the tensors of torch's `Join` live.")
    join_process_group = property(attrgetter("process_group"), doc="The group `Join` counts.")

    def register_comm_hook(self, state: object, hook: Callable) -> None:
        """Let ``hook(state, bucket)`` average each bucket instead of an all-reduce; it returns a
        ``torch.futures.Future`` of the new contents. Can be called once."""
        check_hook(hook)
        if self.reducer is not None:
            if self.reducer.queue.comm_hook is not None:
                raise RuntimeError("register_comm_hook can only be called once.")
            self.reducer.queue.comm_hook = partial(run_hook, state, hook)

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets in launch order; they change once, after the first backward pass."""
        return [] if self.reducer is None else self.reducer.queue.buckets

    def extra_repr(self) -> str:
        if self.process_group is None:
            return "world of one: no process group, gradients stay as they are"
        world_size, count = dist.get_world_size(self.process_group), len(self.buckets)
        head = f"world size {world_size}, {count} bucket(s) in launch order:"
        return "\n".join([head, *(f"  {bucket!r}" for bucket in self.buckets)])
