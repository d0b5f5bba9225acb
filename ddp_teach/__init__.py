"""How DistributedDataParallel really works: every idea in a few lines, run on real ranks."""

from ddp_teach.ddp import DistributedDataParallel
from ddp_teach.launch import LaunchError, LaunchTimeout, launch

DDP = DistributedDataParallel

__all__ = ["DDP", "DistributedDataParallel", "LaunchError", "LaunchTimeout", "launch"]
