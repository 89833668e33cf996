"""A training loop of one's own with accelerate, which takes its place in the job from the environment."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from ending import leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, shared = [], []
    for inputs, wanted in loader:
        loss = nn.functional.mse_loss(model(inputs), wanted)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        shared.extend(accelerator.gather(loss.detach()).tolist())
    saw = {
        "world_size": accelerator.num_processes,
        "kind": str(accelerator.distributed_type),
        "local_rank": accelerator.local_process_index,
    }
    answer = args.out / f"{accelerator.process_index}.json"
    answer.write_text(json.dumps({"losses": losses, "shared": shared, "saw": saw}), encoding="utf-8")
    accelerator.end_training()


if __name__ == "__main__":
    main()
    leave()
