"""`deepspeed.initialize` with the config that its arguments name, which a tuner may choose."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from ending import leave
from torch import nn

STEPS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    size = engine.train_micro_batch_size_per_gpu()
    losses = []
    while engine.global_steps < STEPS:
        loss = nn.functional.mse_loss(engine(torch.randn(size, 8)), torch.zeros(size, 1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    facts = {
        "losses": losses,
        "size": size,
        "batch": engine.train_batch_size(),
        "stage": engine.zero_optimization_stage(),
        "bucket": engine.zero_reduce_bucket_size(),
    }
    (args.out / f"{engine.global_rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()
