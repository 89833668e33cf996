"""dsl starts, watches and ends the workers of a distributed training job.

As a library, dsl is its engine: describe a group with `WorkerSpec` and `LaunchSpec`, start it with a
`Supervisor`, and read what happens as a stream of events that ends with `Ended`. The command ``dsl``, and the
names that DeepSpeed users import from `dsl.runner`, use the same engine.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the built-in module behind `signal`, which has no stub
import sys

# With `python -m dsl.run` and the like the whole process is ours, so Ctrl-C ends it without a traceback.
# While Python looks for the module, `sys.argv[0]` is `-m` instead of the module's name.
if (
    getattr(sys, "argv", [])[:1] == ["-m"]
    and sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0] in (__name__, "dsl_launcher")
    and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
):
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

from dsl._core import (
    BindingError,
    EngineError,
    Guard,
    LimitError,
    SpecError,
    Supervisor,
    __version__,
)
from dsl.engine import (
    EVENT_VERSION,
    Called,
    Ended,
    Event,
    Exit,
    Exited,
    ForkServerLost,
    ForkServerReady,
    ForkServerSlow,
    GuardOutcome,
    Killing,
    LaunchSpec,
    Leftovers,
    LogNotice,
    Output,
    SignalReceived,
    Started,
    Stdio,
    Stopping,
    Unbound,
    WorkerSpec,
)

__all__ = [
    "EVENT_VERSION",
    "BindingError",
    "Called",
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
    "Leftovers",
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
