"""`deepspeed.initialize` with the config that its arguments name, which a tuner may choose."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import deepspeed
import torch
from ending import leave
from torch import nn

STEPS = 8
FORWARD_S = 0.05
"""What a micro batch of any size takes, so that a busy machine changes little."""


class Steady(nn.Module):
    """Takes its time."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(Steady(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    size = engine.train_micro_batch_size_per_gpu()
    losses, elapsed_s = [], []
    while engine.global_steps < STEPS:
        begin_s = time.monotonic()
        loss = nn.functional.mse_loss(engine(torch.randn(size, 8)), torch.zeros(size, 1))
        engine.backward(loss)
        engine.step()
        elapsed_s.append(time.monotonic() - begin_s)
        losses.append(loss.item())
    facts = {
        "losses": losses,
        "samples_per_s": size / statistics.median(elapsed_s),
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
