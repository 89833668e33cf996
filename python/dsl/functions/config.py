"""`LaunchConfig`, as users of torch.distributed.launcher write it, and how it becomes a request."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

# Not one of our frozen records: users change, copy and inspect a config as they do with torch's dataclass.
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from dsl.errors import OptionError, UnsupportedError
from dsl.model.options import COMMON, SECONDS, BadValueError, request_of
from dsl.model.request import DEFAULT_DEBUG_ADDRESS, DEFAULT_DEBUG_PORT, DEFAULT_PARTIAL_S, Program, Request
from dsl.output import TEMPLATE_VARIABLE
from dsl.plan.meeting_point import STATIC, STATIC_RUN_ID
from dsl.words import BEYOND, MOST_NODES, parse_integer, parse_number, parse_signals, shorten

TIMEOUT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
DEFAULT_TIMEOUT_S = 30
"""Seconds that torch waits after a stop signal."""

MEETING_TIMEOUT_S = 900
"""Seconds that torch waits for other nodes. We do not use it, but programs read it back."""


@dataclass
class LaunchConfig:
    """How to start a group of workers. The first fields are those of torch 2.15, in its order.

    As in torch, the fields are resolved and checked when you make a config. The launch checks them again.
    docs/functions.md has a line for each field. A field with the name of an option of ``dslrun`` means the
    same; what is a list of words there may be a collection here, too, and ``_s`` stands for seconds.

    With ``rdzv_backend="static"`` both numbers of nodes must be equal, ``rdzv_endpoint`` is the
    ``"HOST:PORT"`` where the workers meet, and ``rdzv_configs`` is ``{"rank": NODE_RANK}``. After the launch
    a config without a ``run_id`` has one.

    Accepted without effect: rdzv_timeout and ``rdzv_configs["timeout"]``, monitor_interval (nothing is
    polled), metrics_cfg, event_log_handler, exit_barrier_timeout (torch has it after 2.15).
    Gone, and refused unless they have their defaults: prewarm, fork_server_per, import_throttle.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int | str
    logs_specs: str | None = None
    run_id: str | None = ""
    role: str = "default_role"
    rdzv_endpoint: str | None = ""
    rdzv_backend: str = "c10d"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None
    exit_barrier_timeout: float | None = None
    log_dir: str | os.PathLike[str] | None = None
    redirects: str | int | Mapping[int, int] | Mapping[str, int] = ""
    tee: str | int | Mapping[int, int] | Mapping[str, int] = ""
    local_ranks_filter: str | Collection[int] | None = None
    ranks_filter: str | Collection[int] | None = ""
    partial_after_s: float | None = DEFAULT_PARTIAL_S
    grace_s: float | None = None
    signal_scope: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    preload: str | Collection[str] | None = ()
    warm_for_s: float | None = None
    warm_memory: int | None = None
    wrap: str | Collection[str] = ()
    debug: str | Collection[int] | None = ""
    debug_port: int = DEFAULT_DEBUG_PORT
    debug_address: str = DEFAULT_DEBUG_ADDRESS
    debug_wait: bool = False
    stacks_on_failure: bool = False
    hang_timeout_s: float | None = None
    hang_action: str = "report"
    events: str | os.PathLike[str] | None = None
    metrics: str | int | os.PathLike[str] | None = None
    spares: int = 0
    restart_on: str | Collection[int | str] | None = ""
    give_up_on: str | Collection[int | str] | None = ""
    prewarm: bool = False
    fork_server_per: str = "node"
    import_throttle: int | None = None

    def __post_init__(self) -> None:
        """Resolve what was left open.

        Raises:
            OptionError: a field or ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT`` has a value that makes no sense.
        """
        _check_types(self)
        default_s = (
            _default_timeout_s() if self.shutdown_timeout is None or self.grace_s is not None else None
        )
        if self.grace_s is not None and self.shutdown_timeout not in (None, default_s):
            raise OptionError("grace_s and shutdown_timeout mean the same, give one of them")
        if self.shutdown_timeout is None:
            self.shutdown_timeout = default_s
        timeout_s = self.rdzv_configs.get("timeout", MEETING_TIMEOUT_S)
        timeout_s = timeout_s if self.rdzv_timeout == -1 else self.rdzv_timeout
        self.rdzv_configs = {**self.rdzv_configs, "timeout": timeout_s}
        if self.numa_options is None:
            self.numa_options = _default_numa_options(self.nproc_per_node)
        _check_values(self)


OPTION_NAMES = {
    "run_id": "rdzv_id", "numa_options": "numa_binding", "grace_s": "grace",
    "partial_after_s": "partial_after", "hang_timeout_s": "hang_timeout", "warm_for_s": "warm_for",
    "env": "",
}  # fmt: skip
"""Options whose names differ from the fields of a `LaunchConfig`; empty: the field is no option's value."""
_COMMON = {option.dest: option for group in COMMON.values() for option in group}
ROWS = {
    name: _COMMON[OPTION_NAMES.get(name, name)]
    for name in LaunchConfig.__dataclass_fields__
    if OPTION_NAMES.get(name, name) in _COMMON
}
"""The fields that mean what an option of both commands means."""


def to_request(config: LaunchConfig, program: Program, source: str = "") -> Request:
    """The request of a config; ``program`` is what to start, ``source`` the file of a function's module.

    Raises:
        OptionError: a field makes no sense.
        UnsupportedError: logs_specs is an object and not a name, or debug is set for a program.
    """
    from uuid import uuid4

    _check_types(config)
    _check_values(config)
    _check_nodes(config)
    if config.debug and program.kind != "call":
        raise UnsupportedError(
            f"debug {_listed(config.debug)!r}: {program.name} is a program, and only functions run under a "
            "debugger here; dslrun --debug debugs a script"
        )
    least, most = config.min_nodes, config.max_nodes
    is_dynamic = most > 1 and config.rdzv_backend != STATIC
    is_static = config.rdzv_backend == STATIC and bool(config.rdzv_endpoint)
    grace_s = config.shutdown_timeout if config.grace_s is None else config.grace_s
    # An empty template means no prefix, whatever the environment says.
    no_prefix = {TEMPLATE_VARIABLE: ""} if config.log_line_prefix_template == "" else {}
    values = {option.dest: getattr(config, name) for name, option in ROWS.items()}
    said = {name: as_said(values[name]) for name, as_said in _AS_SAID.items()}
    return request_of(
        "functions",
        program,
        ROWS.values(),
        {**values, **said},
        resources={
            "min_nodes": least,
            "max_nodes": most,
            "spares": config.spares,
            "nproc_per_node": str(config.nproc_per_node),
        },
        meeting={
            "node_rank": _node_rank(config) if most > 1 and not is_dynamic else 0,
            "local_addr": config.local_addr,
            "backend": STATIC if is_static else config.rdzv_backend if is_dynamic else "c10d",
            "endpoint": (config.rdzv_endpoint or "") if is_static or is_dynamic else "",
            "settings": _settings(config) if most > 1 else "",
            "run_id": config.run_id or (STATIC_RUN_ID if most > 1 and not is_dynamic else str(uuid4())),
        },
        signals={
            "stop": _signals(config.signals_to_handle),
            "grace_s": float(_default_timeout_s() if grace_s is None else grace_s),
        },
        output={
            "template": config.log_line_prefix_template or "",
            "stdin": "none",
            "logs_specs": config.logs_specs,
        },
        placement={
            "numa_binding": _numa_mode(config),
            "virtual_local_rank": config.virtual_local_rank,
        },
        start={"source": source},
        max_restarts=config.max_restarts,
        role=config.role,
        env=tuple({**config.env, **no_prefix}.items()),
    )


GONE = {"prewarm": False, "fork_server_per": "node", "import_throttle": None}
"""Fields of earlier versions, and the values that ask for nothing."""


KINDS: dict[str, type] = {
    "int": Integral, "float": Real, "bool": Integral, "str": str, "os.PathLike": os.PathLike,
    "None": type(None), "list": Collection, "Collection": Collection, "dict": Mapping, "Mapping": Mapping,
}  # fmt: skip
"""What values of these annotations are instances of."""
UNCHECKED = (
    *("rdzv_timeout", "monitor_interval", "metrics_cfg", "event_log_handler", "exit_barrier_timeout"),
    *(*GONE, "logs_specs", "numa_options"),
)
"""Fields without effect, and those that may have objects of torch."""
TYPES = {
    name: str(one.type) for name, one in LaunchConfig.__dataclass_fields__.items() if name not in UNCHECKED
}
TYPES["shutdown_timeout"] = "float | None"  # torch takes fractions, too


def _check_types(config: LaunchConfig) -> None:
    """Refuse values that are not of the type of their field. Raises OptionError."""
    for name, annotation in TYPES.items():
        value, words = getattr(config, name), {*re.sub(r"\[.*?\]", "", annotation).split(" | ")}
        # Text is no list of its letters.
        words = words & {"str"} if isinstance(value, (str, bytes)) else words - {"str"}
        if not any(isinstance(value, KINDS[word]) for word in words):
            raise OptionError(f"{name} {shorten(repr(value))}: expected {annotation}")
    pairs: Mapping[Any, Any] = config.env
    for variable, value in pairs.items():
        if not (isinstance(variable, str) and isinstance(value, str)):
            raise OptionError(f"env[{variable!r}]: expected {TYPES['env']}")


def _check_values(config: LaunchConfig) -> None:
    """Refuse fields that make no sense for any program or function. Raises OptionError."""
    least, most = config.min_nodes, config.max_nodes
    if not 1 <= least <= most:
        raise OptionError(f"min_nodes {least}, max_nodes {most}: expected 1 <= min_nodes <= max_nodes")
    for name, default in GONE.items():
        if (value := getattr(config, name)) != default:
            instead = "use start_method 'forkserver' or 'warm': all workers share one import"
            raise OptionError(f"{name} {value!r} is gone, {instead}")
    for name, option in ROWS.items():
        value = getattr(config, name)
        words = [word for word in option.choices or () if word != "auto"]  # that is for scripts
        if words and value not in words and (value is not None or option.default is not None):
            raise OptionError(f"{name} {value!r}: expected one of {', '.join(words)}")
    bounds = {name: option.bounds for name, option in ROWS.items()}
    numbers = {"max_restarts": (0, BEYOND - 1), "spares": (0, MOST_NODES), "shutdown_timeout": SECONDS}
    for name, between in {**bounds, **numbers}.items():
        value = getattr(config, name)
        if between is not None and value is not None and not between[0] <= value <= between[1]:
            raise OptionError(f"{name} {value}: it must be {between[0]} to {between[1]}")
    for name in ("restart_on", "give_up_on"):
        if value := getattr(config, name):
            try:
                _codes(value)
            except BadValueError as error:
                raise OptionError(f"{name}: {error}") from None
    if config.debug:
        from dsl.plan.starting import debug_ranks

        try:
            debug_ranks(_listed(config.debug))
        except OptionError:
            expected = "expected ranks such as '1', '0,2-3' or [0, 2], or 'all'"
            raise OptionError(f"debug {config.debug!r}: {expected}") from None
    if (mode := _numa_mode(config)) is not None:
        from dsl.binding.rules import MODES

        if mode not in MODES:
            raise OptionError(f"numa_options {mode!r}: expected one of {', '.join(MODES)}")
    _signals(config.signals_to_handle)


def _check_nodes(config: LaunchConfig) -> None:
    """Refuse what cannot be launched. Raises OptionError or UnsupportedError."""
    least, most = config.min_nodes, config.max_nodes
    is_static = config.rdzv_backend == STATIC
    if least != most and is_static:
        raise OptionError(
            f"min_nodes {least}, max_nodes {most}: nodes of rdzv_backend 'static' cannot join later, use "
            "equal numbers, or rdzv_backend='c10d'"
        )
    if most > 1 and is_static and not config.rdzv_endpoint:
        raise OptionError(f"max_nodes {most}: rdzv_endpoint is missing, 'HOST:PORT' on the first node")
    if config.spares and most == 1:
        raise OptionError(f"spares {config.spares}: only a job of several nodes can have spares")
    if config.logs_specs is not None and not isinstance(config.logs_specs, str):
        raise UnsupportedError(
            f"logs_specs {type(config.logs_specs).__name__}: this version of dsl takes a plug-in's name, "
            "use log_dir, redirects, tee and local_ranks_filter"
        )


def _settings(config: LaunchConfig) -> str:
    """The backend's settings as on the command line, without torch's 900 s timeout: no backend needs it."""
    left_out = {"timeout", "rank"} if config.rdzv_backend == STATIC else {"timeout"}
    return ",".join([f"{key}={value}" for key, value in config.rdzv_configs.items() if key not in left_out])


def _node_rank(config: LaunchConfig) -> int:
    given = config.rdzv_configs.get("rank")
    rank = parse_number(given) if isinstance(given, str) else given
    last = config.max_nodes + config.spares - 1
    if not isinstance(rank, int) or not 0 <= rank <= last:
        raise OptionError(f"rdzv_configs['rank'] {given!r}: expected this node's rank, 0 to {last}")
    return rank


def _default_timeout_s() -> int:
    text = os.environ.get(TIMEOUT_VARIABLE)
    value = DEFAULT_TIMEOUT_S if text is None else parse_integer(text)
    if value is None or value < 0:
        raise OptionError(f"{TIMEOUT_VARIABLE}={shorten(text or '')}: expected a number of seconds")
    return value


def _numa_mode(config: LaunchConfig) -> str | None:
    mode = getattr(config.numa_options, "affinity_mode", config.numa_options)
    return None if mode is None else str(getattr(mode, "value", mode))


def _default_numa_options(nproc_per_node: int | str) -> Any:
    """What a site has set in a torch that is imported, for nodes with a worker for each device."""
    utils, torch = sys.modules.get("torch._utils_internal"), sys.modules.get("torch")
    try:
        options = utils.get_default_numa_options()  # type: ignore[union-attr]
        is_each = options is not None and torch.accelerator.device_count() == nproc_per_node  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # there is no torch, it has no such function, or no device answers
        return None
    return options if is_each else None


def _streams(value: str | int | Mapping[Any, Any]) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(int(value))
    return ",".join([f"{rank}:{int(one) if isinstance(one, int) else one}" for rank, one in value.items()])


def joined_words(words: Iterable[object] | None) -> str:
    """A list of words as the text of an option, in which a comma of a word is written twice."""
    return ",".join([str(word).replace(",", ",,") for word in words or ()])


def _listed(words: str | Collection[int | str] | None) -> str:
    return words if isinstance(words, str) else ",".join(map(str, words or ()))


def _codes(words: str | Collection[int | str] | None) -> Sequence[int]:
    codes: Sequence[int] = _COMMON["restart_on"].read(_listed(words)) if words else ()
    return codes


_AS_SAID: dict[str, Callable[[Any], Any]] = {
    "redirects": _streams,
    "tee": _streams,
    "local_ranks_filter": _listed,
    "ranks_filter": _listed,
    "duplicate_stdout_filters": joined_words,
    "duplicate_stderr_filters": joined_words,
    "debug": _listed,
    "preload": _listed,
    **dict.fromkeys(("log_dir", "events", "metrics"), lambda value: None if value is None else str(value)),
    "restart_on": _codes,
    "give_up_on": _codes,
    "wrap": lambda value: (value,) if isinstance(value, str) else tuple(map(str, value)),
}
"""What makes of the value of a field the value that the option has on the command line."""


def _signals(text: str, warnings: list[str] | None = None) -> tuple[int, ...]:
    """The signals in a text. As in torch, other words are skipped; ``warnings`` gets a line for each."""
    # No signal is forwarded here: job control belongs to the program or its terminal.
    skipped = [] if warnings is None else warnings
    numbers = parse_signals(text, "signals_to_handle", job_control="cannot be taken", warnings=skipped)
    refuse_nameless(numbers, f"signals_to_handle {text!r}")
    return numbers


def refuse_nameless(numbers: Sequence[int], where: str) -> None:
    """Raise OptionError for a signal that has no name in Python: `SignalException` needs the name."""
    from signal import Signals

    named = {int(one) for one in Signals}
    for number in numbers:
        if number not in named:
            raise OptionError(f"{where}: Python has no name for {number}, choose another")


def warnings_of(config: LaunchConfig, request: Request) -> list[str]:
    """What the user should know about a config and its request, one line for each fact."""
    warnings: list[str] = []
    _signals(config.signals_to_handle, warnings)
    if not config.run_id and config.max_nodes > 1 and config.rdzv_backend != STATIC:
        warnings.append(
            f"the config has no run_id, {request.meeting.run_id} was made up: nodes meet only under the same "
            "one, so give it to every node"
        )
    return warnings
