"""The models that ``bench`` times, each with a batch of inputs for it.

Small enough for a laptop, and chosen so that each spends its time on something else.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def linear() -> tuple[nn.Module, Tensor]:
    """One layer: almost nothing to compute, so that what is left is the wrapper."""
    return nn.Linear(64, 64), torch.randn(16, 64)


def narrow() -> tuple[nn.Module, Tensor]:
    """200 small layers, 400 small gradients: what a gradient costs, however small."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(200))), torch.randn(8, 16)


def mlp() -> tuple[nn.Module, Tensor]:
    """Three large layers, 4 million parameters: bytes to copy and to send."""
    sizes = (nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU())
    return nn.Sequential(*sizes, nn.Linear(1024, 1000)), torch.randn(16, 512)


def transformer() -> tuple[nn.Module, Tensor]:
    """Six layers, 5 million parameters in tensors of many sizes."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(2, 16, 256)


def conv() -> tuple[nn.Module, Tensor]:
    """Convolutions with batch norm: much to compute, and buffers to send before each forward."""
    widths = (3, 16, 32, 32, 64, 64)
    blocks = (
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
        for i, o in zip(widths, widths[1:], strict=False)
    )
    return nn.Sequential(*blocks), torch.randn(4, 3, 16, 16)


WORKLOADS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    f.__name__: f for f in (linear, narrow, mlp, transformer, conv)
}
