"""A job of several nodes whose places are fixed, as two commands on this machine."""

from __future__ import annotations

import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

SUM = """
import datetime, os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
value = torch.tensor([float(2 ** dist.get_rank())])
dist.all_reduce(value)
with open(sys.argv[1] + "/" + os.environ["RANK"], "w") as file:
    print(dist.get_world_size(), os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], int(value), file=file)
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "localhost"])
def test_two_nodes_with_fixed_places_meet(address: str, dsl_command: Path, tmp_path: Path) -> None:
    """Two commands, as on two machines, and a collective over all their workers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    script = tmp_path / "sum.py"
    script.write_text(SUM, encoding="utf-8")
    options = ["--nproc-per-node=2", "--nnodes=2", f"--master-addr={address}", f"--master-port={port}"]
    # The second node first: it waits for the other.
    commands = [
        [str(dsl_command.with_name("dslrun")), *options, f"--node-rank={rank}", str(script), str(tmp_path)]
        for rank in (1, 0)
    ]
    nodes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        ended = [(node.communicate(timeout=150)[1], node.returncode) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [code for _, code in ended] == [0, 0], ended
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(4)]
    assert found == [["4", str(rank // 2), str(rank % 2), "15"] for rank in range(4)]
