"""What the workers of ``dslrun`` find in their environment that those of torchrun do not. Documented in compat.md."""

from __future__ import annotations

ALONE = {"localhost": "127.0.0.1"}
"""A node that meets nobody: the address needs no resolver, which may say ::1. A name that was asked for stays."""


def as_torchrun(worker: dict[str, str]) -> dict[str, str]:
    """What torchrun gives a worker, with our differences."""
    ours = dict(worker)
    # Rank 0 holds the store: the launcher has no torch to hold it with.
    ours["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    # A port of its choice means that the node meets nobody.
    if worker["MASTER_PORT"] == "PORT":
        ours["MASTER_ADDR"] = ALONE.get(worker["MASTER_ADDR"], worker["MASTER_ADDR"])
    # Without a log directory no directories are made for the files of ranks.
    folder, *within = worker["TORCHELASTIC_ERROR_FILE"].split("/")
    ours["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{'_'.join(within)}"
    return ours
