"""Arguments that can't be used: one line that names the argument, its value and what is accepted.

The tables of `launch`, `check`, `trace` and `bench` stand with their other tests; here is the
wrapper's.
"""

import pytest
from torch import nn

from ddp_teach import DistributedDataParallel

SIZE, FLAG = "a positive number of MiB", "True or False"
WRONG = [
    ({"module": 3}, TypeError, "torch.nn.Module"),
    ({"module": None}, TypeError, "torch.nn.Module"),
    ({"module": nn.Linear}, TypeError, "torch.nn.Module"),
    ({"module": "model.pt"}, TypeError, "torch.nn.Module"),
    ({"bucket_cap_mb": -1}, ValueError, SIZE),
    ({"bucket_cap_mb": 0}, ValueError, SIZE),
    ({"bucket_cap_mb": "25"}, ValueError, SIZE),
    ({"bucket_cap_mb": [25]}, ValueError, SIZE),
    ({"bucket_cap_mb": float("nan")}, ValueError, SIZE),
    ({"bucket_cap_mb": float("inf")}, ValueError, SIZE),
    ({"bucket_cap_mb_list": [1, -1]}, ValueError, SIZE),
    ({"bucket_cap_mb_list": [None, "1"]}, ValueError, SIZE),
    ({"bucket_cap_mb_list": 25}, TypeError, "a list of bucket sizes"),
    ({"bucket_cap_mb_list": "25"}, TypeError, "a list of bucket sizes"),
    ({"process_group": [0, 1]}, TypeError, "ProcessGroup"),
    ({"process_group": "gloo"}, TypeError, "ProcessGroup"),
    ({"device_mesh": "cpu"}, TypeError, "DeviceMesh"),
    ({"device_ids": [0, 1]}, ValueError, "a single element"),
    ({"device_ids": [0]}, ValueError, "a single GPU"),
    ({"output_device": 1}, ValueError, "a single GPU"),
    ({"find_unused_parameters": "False"}, TypeError, FLAG),
    ({"static_graph": "no"}, TypeError, FLAG),
    ({"gradient_as_bucket_view": "0"}, TypeError, FLAG),
    ({"init_sync": ""}, TypeError, FLAG),
    ({"forward_sync_buffers": "true"}, TypeError, FLAG),
    ({"batched_grad_copy": "yes"}, TypeError, FLAG),
    ({"skip_all_reduce_unused_params": "yes"}, TypeError, FLAG),
]


@pytest.mark.parametrize("given, kind, accepted", WRONG, ids=[str(g) for g, _, _ in WRONG])
def test_the_wrapper(given, kind, accepted):
    with pytest.raises(kind) as caught:
        DistributedDataParallel(**{"module": nn.Linear(1, 1), **given})
    ((name, value),) = given.items()
    wrong = value[-1] if accepted == SIZE and isinstance(value, list) else value
    message = str(caught.value)
    assert message.startswith(name) or f" {name} " in message
    assert repr(wrong).strip("[]") in message
    assert accepted in message
    assert "\n" not in message
