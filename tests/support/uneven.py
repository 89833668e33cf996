"""A training that torch connects, in which some ranks are slow."""

from __future__ import annotations

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 1 << 30
    def __getitem__(self, index):
        time.sleep(pause_s)
        return torch.ones(8)
def step():
    images = next(loader)
    time.sleep(0.02)
    dist.all_reduce(images)
dist.init_process_group("gloo")
pause_s = 0.2 if str(dist.get_rank()) in sys.argv[2] else 0.0
loader = iter(torch.utils.data.DataLoader(Images()))
for _ in range(3):
    step()
open(f"{sys.argv[1]}-{dist.get_rank()}", "w").close()
while True:
    step()
"""
"""A program. Its arguments: begin of the names of files that tell that a rank is ready, digits of the slow ranks."""
