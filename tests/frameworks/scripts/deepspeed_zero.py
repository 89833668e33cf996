"""`deepspeed.initialize` with ZeRO stage 1 and an optimizer of torch, which needs no compiler."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from ending import leave
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=dataset, config=CONFIG
    )
    losses = []
    for inputs, wanted in loader:
        loss = nn.functional.mse_loss(engine(inputs), wanted)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    shared = [parameter.double().sum().item() for parameter in model.parameters()]
    saw = {
        "world_size": engine.world_size,
        "local_rank": engine.local_rank,
        "local_rank_argument": args.local_rank,
    }
    answer = args.out / f"{engine.global_rank}.json"
    answer.write_text(json.dumps({"losses": losses, "shared": shared, "saw": saw}), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
