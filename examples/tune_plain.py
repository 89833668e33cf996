"""Train a small network from a JSON config, in a way that ``dsl --autotuning`` can tune: no DeepSpeed needed.

Three things make a script tunable, and each is marked below. Start it with::

    dsl --num_gpus 1 --autotuning tune examples/tune_plain.py --config examples/tune_plain.json
    dsl --num_gpus 1 --autotuning run examples/tune_plain.py --config examples/tune_plain.json
    dsl --num_gpus 1 examples/tune_plain.py --config examples/tune_plain.json

The second one trains with what it has found, the third with the config as it is. With more workers each has
samples of its own, and gradients are averaged.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES, CLASSES = 32, 8


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="small training that can be tuned")
    # 1. The config comes as a file, by an option that is called --config.
    parser.add_argument("--config", type=Path, required=True, help="JSON file")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="used when LOCAL_RANK is not set")
    return parser.parse_args()


def write_metrics(path: str, metrics: dict[str, float]) -> None:
    """Write the file beside its place, then rename it: a reader sees all of it or nothing."""
    draft = Path(f"{path}.new")
    draft.write_text(json.dumps(metrics), encoding="utf-8")
    draft.replace(path)


def train(config: dict[str, Any], rank: int) -> None:
    """Train, or measure a few steps if somebody tunes."""
    # 2. While a tuning measures, the section says so, and after which step it is enough.
    tuning = config.get("autotuning", {})
    is_measured = bool(tuning.get("enabled") and tuning.get("metric_path"))
    steps = tuning.get("end_profile_step", 5) if is_measured else config["steps"]
    first = min(tuning.get("start_profile_step", 3), steps - 1) if is_measured else 0

    torch.manual_seed(config.get("seed", 0))
    teacher = torch.randn(FEATURES, CLASSES)
    width, batch = config["model"]["width"], config["batch_size"]
    network = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, CLASSES))
    replica = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(replica.parameters(), lr=config["optimizer"]["lr"], momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    started_s, loss_sum = time.perf_counter(), torch.zeros(1)
    for step in range(steps):
        if step == first:
            started_s, loss_sum = time.perf_counter(), torch.zeros(1)
        inputs = torch.randn(batch, FEATURES, generator=data)
        loss = nn.functional.cross_entropy(replica(inputs), (inputs @ teacher).argmax(dim=1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
    elapsed_s = time.perf_counter() - started_s
    dist.all_reduce(loss_sum)
    count = (steps - first) * dist.get_world_size()
    mean_loss, throughput = loss_sum.item() / count, batch * count / elapsed_s
    if rank != 0:
        return
    if is_measured:
        # 3. Rank 0 writes numbers, the one that is tuned among them, and the script ends with 0.
        write_metrics(tuning["metric_path"], {"loss": mean_loss, "throughput": throughput})
    else:
        print(
            f"trained {steps} steps with {json.dumps(config['optimizer'])}: loss {mean_loss:.4f}", flush=True
        )


def main() -> None:
    """Join the process group, train, leave."""
    args = parse_args()
    config = json.loads(args.config.read_text(encoding="utf-8"))
    dist.init_process_group("gloo")
    train(config, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # as in train_ddp.py: a thread of Gloo may still hold a tensor while the interpreter ends


if __name__ == "__main__":
    main()
