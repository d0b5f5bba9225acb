"""Torch's own DistributedDataParallel tests, run on CPU ranks (gloo) against our class.

The tests ship inside the torch wheel. Most of them ask for GPUs only to place tensors, so this
module places those tensors on the CPU instead, and swaps the class under test. All that is done to
torch for the whole process, so these tests have a pytest run of their own: ``make conformance``.

    DDP_IMPL=torch.nn.parallel:DistributedDataParallel make conformance  # torch, as a check
    DDP_SUITE=internals make conformance  # the other list below
"""

import contextlib
import importlib
import os
import tempfile

# What can be seen from outside: a drop-in passes all of these.
CORE = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffers_deprecation_warning",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_compile_static_graph",
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_create_graph",
    "test_ddp_device_mesh_initialization",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",
    "test_ddp_hook_parity_post_localSGD",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_model_diff_num_params_across_ranks",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_zero_output_features",
    "test_grads_same_across_ranks_with_no_sync",
    "test_invalid_static_graph",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_stateless_api_with_ddp",
    "test_static_graph_api_cpu",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
]

# These reach into what torch keeps to itself: its logger, its C++ reducer, private hooks.
INTERNALS = [
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_build_debug_param_to_name_mapping",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad",
    "test_ddp_comm_hook_logging",
    "test_ddp_logging_data_cpu",
    "test_ddp_native_mixed_precision_ignored_params",
    "test_ddp_profiling_torch_profiler",
    "test_ddp_python_error_logged",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_sink_noclone",
    "test_detect_ddp_is_actually_static",
    "test_skip_all_reduce_unused_parameters",
]

SUITES = {"core": CORE, "internals": INTERNALS, "all": CORE + INTERNALS}

folder = tempfile.TemporaryDirectory(prefix="torch_ddp_suite_")  # removed when pytest ends
os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("TEMP_DIR", folder.name)
for name in ("barrier", "test_dir"):
    os.makedirs(os.path.join(os.environ["TEMP_DIR"], name), exist_ok=True)

import torch  # noqa: E402
import torch.testing._internal.common_distributed as common  # noqa: E402
from torch import nn  # noqa: E402


def run_anyway(test):
    return test


# The decorators that skip are read while distributed_test is imported: replace them first.
common.skip_if_no_gpu = run_anyway
common.skip_if_lt_x_gpu = lambda *args, **kwargs: run_anyway
common.nccl_skip_if_lt_x_gpu = lambda *args: run_anyway

from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402


def names_gpu(device):
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(factory):
    def build(*args, **kwargs):
        if names_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return build


def to_cpu(to):
    def move(self, *args, **kwargs):
        args = ["cpu" if names_gpu(arg) else arg for arg in args]
        kwargs = {name: "cpu" if names_gpu(arg) else arg for name, arg in kwargs.items()}
        return to(self, *args, **kwargs)

    return move


def stay(self, *args, **kwargs):
    return self


FACTORIES = [
    "tensor",
    "randn",
    "rand",
    "ones",
    "zeros",
    "empty",
    "full",
    "arange",
    "randint",
    "ones_like",
    "zeros_like",
]
for name in FACTORIES:
    setattr(torch, name, on_cpu(getattr(torch, name)))
torch.Tensor.to, nn.Module.to = to_cpu(torch.Tensor.to), to_cpu(nn.Module.to)
torch.Tensor.cuda = nn.Module.cuda = stay
for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
    setattr(torch.cuda, name, lambda *args, **kwargs: None)
torch.cuda.current_device = lambda: 0
torch.cuda.device = lambda *args, **kwargs: contextlib.nullcontext()

module, name = os.environ.get("DDP_IMPL", "ddp_teach:DistributedDataParallel").split(":")
Impl = getattr(importlib.import_module(module), name)
real_init = Impl.__init__


def init_on_cpu(self, module, device_ids=None, output_device=None, *args, **kwargs):
    real_init(self, module, None, None, *args, **kwargs)


Impl.__init__ = init_on_cpu
nn.parallel.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel = Impl
if hasattr(suite, "DistributedDataParallel"):
    suite.DistributedDataParallel = Impl


class TestTorchDDP(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()


wanted = SUITES[os.environ.get("DDP_SUITE", "core")]
missing = [name for name in wanted if not hasattr(TestTorchDDP, name)]
if missing:
    raise RuntimeError(f"This version of torch does not ship these tests: {missing}")
for name in dir(TestTorchDDP):
    if name.startswith("test_") and name not in wanted:
        getattr(TestTorchDDP, name).__test__ = False  # hide it from collection
