"""Hugging Face Trainer on a tiny language model that is made here, with random weights."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from ending import leave
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

WORDS, LENGTH = 64, 16


class Sentences(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(WORDS, (64, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    set_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir=str(args.out / "checkpoints"),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Sentences())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    with torch.no_grad():
        shared = [parameter.double().sum().item() for parameter in trainer.model.parameters()]
    saw = {
        "world_size": arguments.world_size,
        "mode": str(arguments.parallel_mode),
        "local_rank": arguments.local_process_index,
    }
    answer = args.out / f"{arguments.process_index}.json"
    answer.write_text(json.dumps({"losses": losses, "shared": shared, "saw": saw}), encoding="utf-8")


if __name__ == "__main__":
    main()
    leave()
