"""Draw docs/bucket_map.svg, the README's picture: real buckets of a small transformer layer."""

from pathlib import Path

import torch

from ddp_teach import DistributedDataParallel, launch
from ddp_teach.draw import bucket_map

TARGET = Path(__file__).resolve().parent.parent / "docs" / "bucket_map.svg"


def picture_of_learned_buckets():
    """On a rank: one step; then the buckets follow the order in which gradients got ready."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = DistributedDataParallel(layer, bucket_cap_mb=0.03)
    model(torch.randn(2, 8, 64)).sum().backward()
    return bucket_map(model)


def main() -> None:
    """Write the picture."""
    TARGET.parent.mkdir(exist_ok=True)
    launch(picture_of_learned_buckets)[0].save(TARGET)


if __name__ == "__main__":
    main()
