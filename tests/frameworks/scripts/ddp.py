"""Plain DistributedDataParallel over gloo, batches from a loader with a process of its own; may fail once, then resume."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ending import leave
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 5


def train(fail_at_step: int | None) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), num_workers=1)
    first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    losses = []
    for step, (inputs, wanted) in enumerate(loader):
        if step == fail_at_step and first_attempt and dist.get_rank() == 1:
            sys.exit(3)
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    weights = [parameter.double().sum().item() for parameter in model.parameters()]
    return losses, weights


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fail-at-step", type=int)
    parser.add_argument("--local_rank", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    losses, shared = train(args.fail_at_step)
    saw = {
        "world_size": dist.get_world_size(),
        "elastic": dist.is_torchelastic_launched(),
        "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT"),
    }
    answer = args.out / f"{dist.get_rank()}.json"
    answer.write_text(json.dumps({"losses": losses, "shared": shared, "saw": saw}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
