"""Train a small network with DistributedDataParallel: synthetic data, checkpoint, resume, orderly stop.

Start it with one process per worker, for example::

    dsl --num_gpus 2 examples/train_ddp.py --steps 200 --checkpoint /tmp/job/model.pt
    dsl --num_gpus 2 examples/train_ddp.py --steps 400 --checkpoint /tmp/job/model.pt --resume
    dsl --num_gpus 2 examples/train_ddp.py --fail-rank 1 --fail-at-step 5 --fail-code 42   # see the verdict

Rank, world size and master address come from the environment (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``,
``MASTER_ADDR``, ``MASTER_PORT``), as every launcher sets them. Workers use one NVIDIA GPU each (NCCL) where
there are enough, else the CPU (Gloo). A SIGTERM, or a SIGUSR1 as schedulers send it beforehand, lets the step
finish on all ranks, writes a checkpoint and ends with ``--stop-code``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, CLASSES = 32, 8


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="small DDP training on synthetic data")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step, counted from 0")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per worker and step")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and of the first weights")
    parser.add_argument("--log-every", type=int, default=20, help="steps between two lines of rank 0")
    parser.add_argument("--checkpoint", metavar="FILE", help="write the training state here")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint if it exists")
    parser.add_argument(
        "--stop-code", type=int, default=0, help="exit code after a signal (75: queue the job again)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="used when LOCAL_RANK is not set")
    parser.add_argument("--fail-rank", type=int, help="demonstration: this rank dies")
    parser.add_argument("--fail-at-step", type=int, default=0, help="the step at which --fail-rank dies")
    parser.add_argument("--fail-code", type=int, default=42, help="the exit code it dies with")
    args = parser.parse_args()
    if args.resume and not args.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    return args


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """One GPU per local rank if this machine has that many, else the CPU."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    if wanted == "cuda" or (wanted == "auto" and enough):
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def batch(seed: int, step: int, rank: int, size: int, teacher: Any) -> tuple[Any, Any]:
    """One rank's samples at one step: a function of its arguments, so a resumed run sees the same data."""
    generator = torch.Generator().manual_seed(hash((seed, step, rank)))
    inputs = torch.randn(size, FEATURES, generator=generator)
    return inputs, (inputs @ teacher).argmax(dim=1)


def save(path: str, model: Any, optimizer: Any, step: int) -> None:
    """Write the state beside `path`, then rename it: a reader sees the old file or the new one, not half."""
    folder = os.path.dirname(os.path.abspath(path))
    os.makedirs(folder, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".checkpoint-", delete=False) as file:
        try:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def restore(path: str, model: Any, optimizer: Any, rank: int) -> int:
    """Load the state on every rank and return its step; only rank 0 needs to see the file."""
    state: list[Any] = [None]
    if rank == 0 and os.path.exists(path):
        state[0] = torch.load(path, map_location="cpu", weights_only=True)
    dist.broadcast_object_list(state, src=0)
    if state[0] is None:
        return 0
    model.load_state_dict(state[0]["model"])
    optimizer.load_state_dict(state[0]["optimizer"])
    return int(state[0]["step"])


def fingerprint(model: Any) -> str:
    """Short digest of all parameters: equal on two ranks only if every bit is."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def train(args: argparse.Namespace, rank: int, device: torch.device, terminated: list[int]) -> bool:
    """Train until the last step, or until a rank has got a signal (`terminated` is not empty): then True."""
    torch.manual_seed(args.seed)
    teacher = torch.randn(FEATURES, CLASSES)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    step = restore(args.checkpoint, model, optimizer, rank) if args.resume else 0
    if rank == 0:
        print(f"{'resuming' if step else 'starting'} at step {step} on {device.type}", flush=True)
    replica = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)

    loss_value, stop = float("nan"), False
    while step < args.steps and not stop:
        if rank == args.fail_rank and step == args.fail_at_step:
            print(f"rank {rank} fails on purpose at step {step}", file=sys.stderr, flush=True)
            os._exit(args.fail_code)
        inputs, labels = batch(args.seed, step, rank, args.batch_size, teacher)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(replica(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        step += 1

        # A signal reaches the ranks at different moments; the sum makes all of them stop after the same step.
        shared = torch.stack([loss.detach(), torch.tensor(float(len(terminated)), device=device)])
        dist.all_reduce(shared)
        loss_value, stop = shared[0].item() / dist.get_world_size(), shared[1].item() > 0
        if rank == 0 and (step % args.log_every == 0 or step == 1):
            print(f"step {step}/{args.steps} loss {loss_value:.4f}", flush=True)
        if rank == 0 and args.checkpoint and (stop or step == args.steps or step % args.save_every == 0):
            save(args.checkpoint, model, optimizer, step)

    if stop and rank == 0:
        print(f"stopped by a signal after step {step}", flush=True)
    result = f"loss {loss_value:.4f} parameters {fingerprint(model)}"
    print(f"rank {rank} ended at step {step} {result}", flush=True)
    return stop


def main() -> None:
    """Join the process group, train, leave."""
    args = parse_args()
    terminated: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda number, _frame: terminated.append(number))
    local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank or 0))
    device = choose_device(args.device, local_rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method="env://", timeout=timedelta(minutes=5))
    stopped = train(args, dist.get_rank(), device, terminated)
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # a late one must not turn the finished work into a failure
    dist.barrier()
    dist.destroy_process_group()
    # A thread of Gloo outlives the group and may still hold a tensor of the last step. If it lets go of that
    # while the interpreter shuts down, the process aborts (seen with torch 2.15), so there is no shutdown.
    sys.stdout.flush()
    os._exit(args.stop_code if stopped else 0)


if __name__ == "__main__":
    main()
