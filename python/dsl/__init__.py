"""dsl starts, watches and ends the workers of a distributed training job.

The library face is the engine itself: describe a group with `WorkerSpec` and `LaunchSpec`, start it with a
`Supervisor`, and read what happens as a stream of events that ends with `Ended`. The command ``dsl`` and the
names that DeepSpeed users import from `dsl.runner` stand on the same engine.
"""

from __future__ import annotations

from dsl._core import (
    EVENT_VERSION,
    BindingError,
    Ended,
    EngineError,
    Event,
    Exit,
    Exited,
    ForkServerLost,
    ForkServerReady,
    ForkServerSlow,
    Guard,
    GuardOutcome,
    Killing,
    LaunchSpec,
    LimitError,
    LogNotice,
    Output,
    SignalReceived,
    SpecError,
    Started,
    Stdio,
    Stopping,
    Supervisor,
    Unbound,
    WorkerSpec,
    __version__,
)

__all__ = [
    "EVENT_VERSION",
    "BindingError",
    "Ended",
    "EngineError",
    "Event",
    "Exit",
    "Exited",
    "ForkServerLost",
    "ForkServerReady",
    "ForkServerSlow",
    "Guard",
    "GuardOutcome",
    "Killing",
    "LaunchSpec",
    "LimitError",
    "LogNotice",
    "Output",
    "SignalReceived",
    "SpecError",
    "Started",
    "Stdio",
    "Stopping",
    "Supervisor",
    "Unbound",
    "WorkerSpec",
    "__version__",
]
