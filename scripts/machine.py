"""What a set-up does on the machine itself: runs commands, tells its progress, installs packages of Debian.

Uses the standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
LINES_OF_A_FAILURE = 20


def say(text: str) -> None:
    """One line of progress."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """End with one line that says what to do."""
    sys.exit(f"set-up: {text}")


def call(*command: str, env: dict[str, str] | None = None, lines: int = LINES_OF_A_FAILURE) -> None:
    """Run a command; its failure ends the set-up, and only then its last lines are shown."""
    result = subprocess.run(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    if result.returncode != 0:
        print(*result.stdout.splitlines()[-lines:], sep="\n", file=sys.stderr)
        fail(f"`{' '.join(command)}` failed with exit code {result.returncode}")


def output(*command: str, env: dict[str, str] | None = None) -> str:
    """What a command prints; empty when it fails or does not exist."""
    try:
        result = subprocess.run(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return result.stdout if result.returncode == 0 else ""


class Need(NamedTuple):
    """Packages of the system, for what the virtual environment cannot hold."""

    purpose: str
    packages: tuple[str, ...]
    """Their names in Debian and Ubuntu."""
    is_must: bool = True
    """If not, the tests that lack it are skipped, and say so."""


def may_install() -> bool:
    """Whether this user may install packages of Debian here."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def meet(missing: list[Need]) -> list[Need]:
    """Install what is missing, after saying so, or say how to. Returns what apt does not offer."""
    if not missing:
        return []
    if not may_install():
        do_without(missing)
        return []
    listing = "; ".join(f"{' '.join(need.packages)} ({need.purpose})" for need in missing)
    say(f"apt-get installs on this machine: {listing}")
    if sys.stdin.isatty() and "CI" not in os.environ:
        print("set-up: go on? [Y/n] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in {"", "y", "yes"}:
            do_without(missing)
            return []
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    call("apt-get", "update", "-qq", env=env)
    # Ubuntu's Chromium, say, is only a reference to a snap.
    absent = [
        need for need in missing if not need.is_must and not output("apt-cache", "show", *need.packages)
    ]
    do_without(absent)
    names = [name for need in missing if need not in absent for name in need.packages]
    if names:
        call("apt-get", "install", "-y", "-qq", "--no-install-recommends", *names, env=env)
    return absent


def do_without(missing: list[Need]) -> None:
    """Say what will be skipped; end if something has to be there."""
    musts = [need for need in missing if need.is_must]
    if musts:
        packages = " ".join(name for need in musts for name in need.packages)
        purposes = ", ".join(need.purpose for need in musts)
        fail(f"missing: {purposes}: first run `sudo apt-get install {packages}`")
    for need in missing:
        packages = " ".join(need.packages)
        say(f"{need.purpose} will be skipped: to have them, run `sudo apt-get install {packages}`")
