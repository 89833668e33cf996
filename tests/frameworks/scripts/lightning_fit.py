"""PyTorch Lightning's Trainer with the ddp strategy; it finds out by itself who has started it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from ending import leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, _index: int) -> Any:
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.layers(inputs), wanted)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    args = parser.parse_args()
    lightning.seed_everything(0)
    model = Regression()
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=8, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        num_nodes=args.nodes,
        strategy="ddp",
        max_steps=4,
        default_root_dir=args.out,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    shared = [trainer.callback_metrics["loss"].item()]
    saw = {
        "world_size": trainer.world_size,
        "environment": type(trainer.strategy.cluster_environment).__name__,
        "local_rank": trainer.local_rank,
    }
    answer = args.out / f"{trainer.global_rank}.json"
    answer.write_text(json.dumps({"losses": model.losses, "shared": shared, "saw": saw}), encoding="utf-8")


if __name__ == "__main__":
    main()
    leave()
