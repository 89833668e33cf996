"""The functions that users of DeepSpeed import from its runner, under the same names.

Arguments and results are those of ``deepspeed.launcher.runner`` 0.19.8. Mistakes raise the errors of
`dsl.errors`, which are also the builtin exceptions that DeepSpeed raises for them.
"""

from __future__ import annotations

import sys

from dsl.machine import read_input
from dsl.plan.hosts import apply_filters, missing_hostfile, parse_num_nodes, read_hostfile
from dsl.resources.hosts import parse_hostfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence
    from typing import TypeVar

    _T = TypeVar("_T")

__all__ = [
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_num_nodes",
    "parse_resource_filter",
]


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of ``dsl`` (default: that of this process). Exits with 2 for bad usage."""
    from dsl.cli import deepspeed

    return deepspeed.parse_args(sys.argv[1:] if args is None else args)


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """``{"localhost": [0, 1]}`` -> ``"eyJsb2NhbGhvc3QiOiBbMCwgMV19"``: JSON in URL-safe base64."""
    from base64 import urlsafe_b64encode
    from json import dumps

    return urlsafe_b64encode(dumps(world_info).encode()).decode()


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Read a hostfile: host -> number of slots; None, and a warning in the log, if there is no such file.

    Raises:
        HostfileError: a malformed line, a host named twice, no host, or a file that cannot be read.
    """
    pool = read_hostfile(hostfile_path, read_input)
    if pool is None:
        from logging import getLogger

        getLogger("dsl").warning("%s", missing_hostfile(hostfile_path))
    return pool


def _parse_hostfile(hostfile_lines: Iterable[str]) -> dict[str, int]:
    return parse_hostfile(hostfile_lines)


def _stable_remove_duplicates(data: Iterable[_T]) -> list[_T]:
    unique: list[_T] = []
    for item in data:
        if item not in unique:
            unique.append(item)
    return unique


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> Mapping[str, Sequence[int]]:
    """Apply a filter to host -> slots. Without a filter it returns the same object.

    Raises:
        FilterError: both filters, a malformed one, or an unknown host or slot.
    """
    if not include_str and not exclude_str:
        return host_info
    return apply_filters(host_info, include_str, exclude_str)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> Mapping[str, Sequence[int]]:
    """Apply a filter to the resource pool, host -> number of slots. Raises FilterError."""
    pool = {host: list(range(slots)) for host, slots in resource_pool.items()}
    return parse_resource_filter(pool, include_str=inclusion, exclude_str=exclusion)


def main(args: Sequence[str] | None = None) -> None:
    """Run the ``dsl`` command in this process; returns if the job ended well, else exits with its code.

    Raises:
        DslError: a mistake in the arguments, or in a file that they name.
        EngineError: the workers cannot be started on this machine.
    """
    from dsl.cli import in_process

    code = in_process.run_deepspeed(sys.argv[1:] if args is None else args)
    if code:
        sys.exit(code)
