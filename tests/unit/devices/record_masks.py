"""Recording of how many devices torch counts for values of ``CUDA_VISIBLE_DEVICES``.

``PYTHON tests/unit/devices/record_masks.py``, with an interpreter that has torch, writes
``fixtures/cuda_visible.json``. No GPU is needed: what torch would ask NVML is answered here.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

UUIDS = ["GPU-8932f937", "GPU-8932aaaa", "GPU-77770000", "GPU-1"]
WORDS = (
    *["0", "1", "2", "3", "4", "9", "-1", "", " ", "x", "0-3", "1gpu2", " 2", "+1", "01", "3 ", "NoDevFiles"],
    *["GPU-8", "GPU-8932f", "GPU-7", "GPU-77770000", "GPU-1", "GPU-", " GPU-1", "gpu-1"],
)


def values() -> list[str]:
    """Each word, and lists of them that are the same each time."""
    generator = random.Random(20)
    lists = [",".join(generator.choices(WORDS, k=generator.randint(2, 5))) for _ in range(300)]
    return sorted({*WORDS, *lists})


def record() -> None:
    """Ask torch about every value."""
    import torch

    cuda: Any = torch.cuda
    cuda._raw_device_count_nvml = lambda: len(UUIDS)
    cuda._raw_device_uuid_nvml = lambda: UUIDS
    counts = {}
    for value in values():
        os.environ["CUDA_VISIBLE_DEVICES"] = value
        counts[value] = cuda._device_count_nvml()
    about = f"torch {torch.__version__}: its count of devices by NVML, for a machine with these"
    target = Path(__file__).parent / "fixtures" / "cuda_visible.json"
    data = {"about": about, "uuids": UUIDS, "counts": counts}
    target.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
