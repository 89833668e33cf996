"""Namespaces for the commands of tests, where this user may make some: in a container also root may often not."""

from __future__ import annotations

import functools
import shutil
import subprocess

import pytest


def unshared(*options: str) -> list[str]:
    """The words before a command that give it namespaces of its own: `unshare` with these options.

    A test is skipped where the kernel or the container refuses them.
    """
    if not are_allowed(*options):
        pytest.skip(f"needs namespaces that are refused here: unshare {' '.join(options)}")
    return [str(shutil.which("unshare")), *options]


@functools.cache
def are_allowed(*options: str) -> bool:
    """Whether `unshare` may be used with these options."""
    return subprocess.run(["unshare", *options, "true"], capture_output=True, check=False).returncode == 0
