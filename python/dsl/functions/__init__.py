"""Launch workers from Python, and catch failures as typed errors, as users of torchrun do.

::

    from dsl.functions import LaunchConfig, elastic_launch

    # {rank: what train returned}
    results = elastic_launch(LaunchConfig(1, 1, nproc_per_node=4), train)(epochs)

Each name is imported on first use, because the commands need none of them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dsl.functions.launcher import (
        ChildFailedError,
        EntrypointError,
        LaunchConfig,
        ProcessFailure,
        ResultError,
        SignalException,
        elastic_launch,
        launch,
        launch_agent,
        warm_launch,
    )

__all__ = [
    "ChildFailedError",
    "EntrypointError",
    "LaunchConfig",
    "ProcessFailure",
    "ResultError",
    "SignalException",
    "elastic_launch",
    "launch",
    "launch_agent",
    "warm_launch",
]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("dsl.functions.launcher"), name)
