"""The engine's classes: with `dsl.spec` the only importer of the extension."""

from __future__ import annotations

from dsl._core import (
    BindingError,
    Ended,
    EngineError,
    Event,
    Exit,
    Exited,
    Guard,
    GuardOutcome,
    Killing,
    LaunchSpec,
    LimitError,
    Output,
    SignalReceived,
    SpecError,
    Started,
    Stdio,
    Stopping,
    Supervisor,
    WorkerSpec,
    __version__,
)

__all__ = [
    "BindingError",
    "Ended",
    "EngineError",
    "Event",
    "Exit",
    "Exited",
    "Guard",
    "GuardOutcome",
    "Killing",
    "LaunchSpec",
    "LimitError",
    "Output",
    "SignalReceived",
    "SpecError",
    "Started",
    "Stdio",
    "Stopping",
    "Supervisor",
    "WorkerSpec",
    "__version__",
]
