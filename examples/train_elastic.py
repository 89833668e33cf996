"""Train a small network while nodes come and go: the loss at a step does not depend on the number of workers.

Type the first command on each node, or the second once, and end some nodes as you like::

    dslrun --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint n0:29400 train_elastic.py --checkpoints /tmp/job
    dsl -H hosts --elastic_training --num_nodes 1:4 --master_addr n0 train_elastic.py --checkpoints /tmp/job
    dslrun --max-restarts 3 --nproc-per-node 2 train_elastic.py --fail-rank 1 --fail-at-step 5

What makes a training elastic is all in this file:

* The batch of a step is a function of the seed and the number of the step, and the workers share it:
  ``BATCH`` samples a step, on one worker and on seven.
* Each start goes on from the newest checkpoint that any worker sees. The first worker of each node writes
  them, so no shared file system is needed; on a shared one the files have the same names and contents.
* A SIGTERM, by which workers are stopped when the nodes change, writes a checkpoint of the last whole step.
  So does the loss of a peer. A worker that gets no time for that loses ``--save-every`` steps at most.

Rank 0 prints a line a step. Workers use one NVIDIA GPU each (NCCL) where there are enough, else the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, CLASSES, BATCH = 32, 8, 96
KEPT = 2
"""Checkpoints that are left."""


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="small DDP training whose number of workers may change")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step, counted from 0")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and of the first weights")
    parser.add_argument("--checkpoints", metavar="DIR", help="write checkpoints here, go on from the newest")
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--pace", type=float, default=0.0, metavar="S", help="least seconds of a step")
    parser.add_argument("--stop-file", metavar="FILE", help="end in order once a worker sees this file")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="used when LOCAL_RANK is not set")
    parser.add_argument("--fail-rank", type=int, help="demonstration: this rank dies")
    parser.add_argument("--fail-at-step", type=int, default=0, help="the step at which --fail-rank dies")
    parser.add_argument("--fail-times", type=int, default=1, help="how many attempts --fail-rank spoils")
    return parser.parse_args()


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """One GPU per local rank if this machine has that many, else the CPU."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    if wanted == "cuda" or (wanted == "auto" and enough):
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def batch(seed: int, step: int, teacher: Any) -> tuple[Any, Any]:
    """This worker's share of the samples of a step, which are the same on any number of workers."""
    generator = torch.Generator().manual_seed(hash((seed, step)))
    inputs = torch.randn(BATCH, FEATURES, generator=generator)[dist.get_rank() :: dist.get_world_size()]
    return inputs, (inputs @ teacher).argmax(dim=1)


def checkpoints(folder: str) -> list[str]:
    """Names of the whole ones, oldest first."""
    if not os.path.isdir(folder):
        return []
    return sorted(name for name in os.listdir(folder) if name.startswith("step-"))


class Training:
    """The model and how far it has come."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.device = device
        self.teacher = torch.randn(FEATURES, CLASSES)
        self.model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.done = 0
        self.saved = 0

    def save(self) -> None:
        """Write the state to a file of its own, all of it or nothing: a late writer spoils no newer one."""
        if not self.args.checkpoints or self.saved == self.done or os.environ["LOCAL_RANK"] != "0":
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.done,
        }
        folder = self.args.checkpoints
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".unfinished-", delete=False) as file:
            try:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, os.path.join(folder, f"step-{self.done:09}.pt"))
            except BaseException:
                os.unlink(file.name)
                raise
        self.saved = self.done
        for name in checkpoints(folder)[:-KEPT]:
            with contextlib.suppress(FileNotFoundError):  # another node has done it
                os.unlink(os.path.join(folder, name))

    def restore(self) -> None:
        """Go on from the newest checkpoint of any worker: a node that was away has an old one, or none."""
        folder = self.args.checkpoints
        names: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(names, (["", *checkpoints(folder)] if folder else [""])[-1])
        newest = max(names)
        if not newest:
            return
        owner = names.index(newest)
        shared: list[Any] = [None]
        if owner == dist.get_rank():
            path = os.path.join(folder, newest)
            shared = [torch.load(path, map_location="cpu", weights_only=True)]
        dist.broadcast_object_list(shared, src=owner)
        self.model.load_state_dict(shared[0]["model"])
        self.optimizer.load_state_dict(shared[0]["optimizer"])
        self.done = self.saved = shared[0]["step"]

    def gradients(self, replica: Any, *, stop: bool) -> tuple[float, bool]:
        """Forward and backward of a step: the loss of the whole batch, and whether a worker wants to stop."""
        inputs, labels = batch(self.args.seed, self.done, self.teacher)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(
            replica(inputs.to(self.device)), labels.to(self.device), reduction="sum"
        )
        # The workers' shares differ in size. Gradients are averaged over workers, and this makes that the
        # average over samples.
        (loss * dist.get_world_size() / BATCH).backward()
        shared = torch.stack([loss.detach() / BATCH, torch.tensor(float(stop), device=self.device)])
        dist.all_reduce(shared)
        return shared[0].item(), shared[1].item() > 0

    def run(self) -> bool:
        """Train until the last step, or until a signal has come: then True."""
        args, rank = self.args, dist.get_rank()
        self.restore()
        replica = DistributedDataParallel(
            self.model, device_ids=[self.device.index] if self.device.type == "cuda" else None
        )
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        reason = os.environ.get("DSL_RESTART_REASON", "unknown")
        told = f"world {dist.get_world_size()} restarts {restarts} reason {reason}"
        if rank == 0:
            print(f"from step {self.done} {told}", flush=True)
        # Only now: before there is a state to save a signal shall end the process at once.
        terminated: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _frame: terminated.append(number))
        stop = False
        while self.done < args.steps and not stop and not terminated:
            begin_s = time.monotonic()
            if rank == args.fail_rank and self.done >= args.fail_at_step and restarts < args.fail_times:
                print(f"rank {rank} fails on purpose after step {self.done}", file=sys.stderr, flush=True)
                os._exit(42)
            try:
                wanted = bool(args.stop_file) and os.path.exists(args.stop_file)
                loss, stop = self.gradients(replica, stop=wanted)
            except RuntimeError:
                self.save()  # a peer has gone: the step that has failed has changed nothing yet
                raise
            self.optimizer.step()
            self.done += 1
            if rank == 0:
                print(f"step {self.done} {told} loss {loss:.6f}", flush=True)
            if self.done % args.save_every == 0:
                self.save()
            time.sleep(max(0.0, args.pace - (time.monotonic() - begin_s)))
        self.save()
        return bool(terminated)


def main() -> None:
    """Join the process group, train, leave."""
    args = parse_args()
    # Sums over another number of workers are rounded otherwise. In double precision nobody ever sees that.
    torch.set_default_dtype(torch.float64)
    local_rank = int(os.environ.setdefault("LOCAL_RANK", str(args.local_rank or 0)))
    device = choose_device(args.device, local_rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(minutes=5))
    was_stopped = Training(args, device).run()
    sys.stdout.flush()
    if was_stopped:  # so have others been, but not all of them, maybe: nobody waits here
        os._exit(128 + signal.SIGTERM)
    dist.barrier()
    dist.destroy_process_group()
    # A thread of Gloo outlives the group and may still hold a tensor of the last step. If it lets go of that
    # while the interpreter shuts down, the process aborts (seen with torch 2.15), so there is no shutdown.
    os._exit(0)


if __name__ == "__main__":
    main()
