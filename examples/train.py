"""Train a small model on one process, on several, on several machines: one file, the same weights.

python examples/train.py                                        one process
python examples/train.py --nprocs 2                             two, started by ddp_teach.launch
torchrun --nproc-per-node 2 examples/train.py                   two, started by torchrun
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \\
    --rdzv-endpoint FIRST_NODE:29400 examples/train.py          four; run it on both nodes

With ``--checkpoint FILE`` the state after every epoch is kept in a file, and a second run goes on
from there. Together with torchrun's ``--max-restarts 3`` a training survives the death of a rank:
torchrun ends the others and starts all of them again, and no more than an epoch is lost. (For that,
torch 2.13's torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment; see nodes.sh.)
On several nodes the file should lie where all of them can see it.

Where every rank can have a GPU of its own, the model goes there and gradients travel by NCCL; else
all stays on the CPU, and gradients travel by gloo. Make it your own: put your model, your data and
your loss in the place of those of ``ddp_teach.character_model``.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

import ddp_teach
from ddp_teach import launch
from ddp_teach.character_model import CharacterModel, make_loader, mean_loss, train_epoch
from ddp_teach.text import Windows, make_text

WRAPPERS = {"ddp_teach": ddp_teach.DDP, "torch": nn.parallel.DistributedDataParallel}
A_YEAR = 365 * 24 * 3600.0  # seconds; launch gives ranks up after a while, training takes its time


def train(options: argparse.Namespace) -> list[float]:
    """Train on this rank, together with the others; returns the loss on new text after each epoch,
    the same on all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if "nccl" in dist.get_backend_config() else "cpu")
    training = Windows(make_text(seed=options.seed), count=options.windows)
    validation = Windows(make_text(50, seed=options.seed + 1))
    loader = make_loader(training, options.batch_size, rank, world_size, options.seed)
    torch.manual_seed(options.seed)
    model = WRAPPERS[options.ddp](CharacterModel().to(device))
    optimizer = torch.optim.Adam(model.parameters(), options.lr)
    history = resume(options.checkpoint, model.module, optimizer)
    for epoch in range(len(history), options.epochs):
        # Without this every epoch would have the order of the first.
        loader.sampler.set_epoch(epoch)
        # Dropout and the like: other numbers on every rank, the same ones after a restart.
        torch.manual_seed((options.seed + epoch) * world_size + rank)
        losses = train_epoch(model, progress(loader, f"epoch {epoch + 1}"), optimizer)
        history.append(evaluate(model.module, validation, device))
        if rank == 0:
            save(options.checkpoint, model.module, optimizer, history)
            what = f"epoch {epoch + 1}: loss {losses[-1]:.3f}, on new text {history[-1]:.3f}"
            print(what, flush=True)
    return history


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset, device: torch.device) -> float:
    """The mean loss over ``data``, each item looked at by one rank; the same number on all ranks.

    ``model`` is not wrapped: ranks may have different numbers of batches, and nothing is averaged.
    (A ``DistributedSampler`` would hand out some items twice, to give all ranks equally many.)
    """
    mine = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, number of items
    model.eval()
    for inputs, targets in DataLoader(mine, batch_size=64):
        loss = mean_loss(model, inputs.to(device), targets.to(device))
        total += torch.stack([loss * len(inputs), torch.ones_like(loss) * len(inputs)])
    model.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def save(
    path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, history: list[float]
) -> None:
    """Keep the state after ``len(history)`` epochs; whoever finds the file finds all of it."""
    if path is None:
        return
    # Without the wrapper: such a file loads with ddp_teach's class, with torch's, and with none.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def resume(path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Load what ``save`` kept, if there is any; returns the history of the epochs that are done.

    Rank 0 reads the file and tells the others, so that all agree on where to go on.
    """
    found: list[Any] = [None]
    if path is not None and dist.get_rank() == 0 and path.exists():
        found = [torch.load(path, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        return []
    model.load_state_dict(found[0]["model"])
    optimizer.load_state_dict(found[0]["optimizer"])
    if dist.get_rank() == 0:
        print(f"goes on after epoch {len(found[0]['history'])}", flush=True)
    return found[0]["history"]


def progress(batches: Iterable, what: str) -> Iterator:
    """The batches, with a bar on rank 0's terminal that grows as they go by.

    Ranks that torchrun started have one; those that ``launch`` started print through it and don't.
    """
    shown = dist.get_rank() == 0 and sys.stderr.isatty()
    total = len(batches)
    for i, batch in enumerate(batches, start=1):
        yield batch
        if shown:
            bar = "#" * (30 * i // total)
            print(f"\r{what} [{bar:30}] {i}/{total}", end="", file=sys.stderr, flush=True)
    if shown:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of a training; by default those of the command line."""
    about = "Train a character model on one or more ranks."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--nprocs", type=int, help="ranks; 1 if not given; torchrun decides itself")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--windows", type=int, default=512, help="pieces of text to learn from")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="file with the state, to go on from")
    parser.add_argument("--ddp", choices=WRAPPERS, default="ddp_teach", help="whose class wraps it")
    options = parser.parse_args(arguments)
    if options.checkpoint and not options.checkpoint.parent.is_dir():
        parser.error(f"--checkpoint: there is no folder {options.checkpoint.parent}")
    return options


def main() -> None:
    options = parse()
    nprocs = options.nprocs or int(os.environ.get("WORLD_SIZE", 1))
    # It joins the ranks that torchrun started, or else starts its own; it ends the process group.
    launch(train, options, nprocs=nprocs, timeout=A_YEAR, live=True)


if __name__ == "__main__":
    main()
