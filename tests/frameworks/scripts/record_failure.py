"""One rank's `@record` main raises; where its error file lies is told to the reader."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rank = os.environ["RANK"]
    (args.out / f"error_file_{rank}").write_text(os.environ["TORCHELASTIC_ERROR_FILE"], encoding="utf-8")
    if rank == "1":
        raise ValueError(f"batch 3 of rank {rank} holds NaN")


if __name__ == "__main__":
    main()
