"""The options of both commands as data: the columns of the table, and the rows that both commands share.

`dsl.cli.options_deepspeed` and `dsl.cli.options_torch` have the other rows. Every launch imports the table,
so it needs only records. `dsl.cli.command` and `dsl.cli.parser` read it; `request_of` fills a request by it.
"""

from __future__ import annotations

from dsl._record import Record, kept
from dsl.model.request import (
    DEFAULT_DEBUG_ADDRESS,
    DEFAULT_DEBUG_PORT,
    DEFAULT_GRACE_S,
    DEFAULT_PARTIAL_S,
    LEAST_HANG_S,
    Request,
)
from dsl.words import (
    LAST_PORT,
    MOST_DIGITS,
    MOST_SECONDS,
    parse_integer,
    parse_seconds,
    parse_size,
    quote,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any, Literal, TypeAlias

    from dsl.model.request import FlavourName, Program

    Origin: TypeAlias = Literal["deepspeed", "torchrun", "dsl"]

DEEPSPEED: Origin = "deepspeed"
TORCHRUN: Origin = "torchrun"
OURS: Origin = "dsl"

DEFAULT_STOP = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""Signals that are passed on and end the job."""
DEFAULT_FORWARD = "SIGUSR1,SIGUSR2"
"""Signals that are only passed on."""

SHELLS = ("bash", "zsh", "tcsh", "fish")
"""The shells that can complete our commands."""

SMALLEST_LOG = 64 * 1024
LARGEST_LOG = 1 << 50
SECONDS = (0, MOST_SECONDS)
PORTS = (1, LAST_PORT)
UNSAID = (None, "", -1, "None")
"""Defaults that say nothing: the field of the request keeps its own default."""


class BadValueError(Exception):
    """A value is refused; the message says what is expected."""


class Option(Record):
    """One option of a command line: a row of the table."""

    origin: Origin
    """The tool that the option comes from.

    A command accepts abbreviations only of options from the tool that it replaces.
    """
    spelled: str
    """Its spellings, between blanks. `names` adds their sisters."""
    metavar: str
    """What the value is; empty: one of the choices, or the option is a flag.

    Help shows it, and shells complete a value by it (`dsl.cli.completion`): words in small letters between
    bars as they are, and other words by what they name: PATH, DIR, FILTER, SIGNAL.
    """
    help: str
    """Its text in the help, one line."""
    default: Any = None
    """The value if the option is not given."""
    read: Callable[[str], Any] = str
    """Makes a value of a word. Raises `BadValueError`."""
    choices: tuple[str, ...] | None = None
    """The allowed values; None: any."""
    own_names: tuple[str, ...] = ()
    """Spellings that ``origin`` does not have, which are never shortened."""
    given: str = ""
    """Name of a second value: whether the option was given. Empty: there is no such value."""
    is_slip: bool = False
    """Scripts rarely have this option: if it comes after the script, it was most likely meant for dsl."""
    bare: str | None = None
    """The value if the user writes none; a written value must then follow ``=``. None: it needs a value."""
    is_text: bool = False
    """The value is free text, which may begin with a dash."""
    into: str = ""
    """The field of a `Request` that it fills, such as ``output.tag``; empty: each front end reads it."""
    make: Callable[[Any], Any] | None = None
    """Makes what the field gets of the value; None: the field gets the value."""
    bounds: tuple[float, float] | None = None
    """The least and the most that the number in a `LaunchConfig` may be."""
    is_flag: bool = False
    """The option takes no value: it is True if it is given."""
    repeats: bool = False
    """The option may be given several times: its value is a tuple of all that were given."""

    @kept
    def names(self) -> tuple[str, ...]:
        """Its spellings, then the other one of each long one: underscores for dashes, or the reverse."""
        words = self.spelled.split()
        for word in self.spelled.split():
            if word[:2] == "--":
                sister = dashed(word) if "_" in word else f"--{word[2:].replace('-', '_')}"
                if sister not in words:
                    words.append(sister)
        return tuple(words)

    @kept
    def dest(self) -> str:
        """Name of its value."""
        return next(word[2:].replace("-", "_") for word in self.spelled.split() if word[:2] == "--")

    def taken(self, text: str, before: tuple[Any, ...] = ()) -> Any:
        """The value with one more word; ``before``: what it was, if it repeats. Raises `BadValueError`."""
        value = self.value_of(text)
        return (*before, value) if self.repeats else value

    def value_of(self, text: str) -> Any:
        """The value of a word, which is one of the choices if there are any. Raises `BadValueError`."""
        value = self.read(text)
        if self.choices is not None and value not in self.choices:
            raise BadValueError(f"invalid choice: {quote(text)}, expected one of {', '.join(self.choices)}")
        return value


class CommandLine(Record):
    """What one command understands: ``OPTIONS SCRIPT ARGUMENTS``."""

    program: str
    """Name of the command."""
    origin: Origin
    """The tool that the command replaces."""
    groups: Mapping[str, tuple[Option, ...]]
    """All options, by the titles of their groups in the help."""
    script: str
    """Name of the value that holds the script."""
    rest: str
    """Name of the value that holds the script's arguments."""
    description: str
    """First line of the help."""
    prefix: str = ""
    """With this before its name, a variable is the default of an option; empty: no variable is."""
    variables: tuple[tuple[str, str], ...] = ()
    """More variables, each with the value whose default it is."""

    @kept
    def options(self) -> tuple[Option, ...]:
        """All options, in the order of the help."""
        return tuple([option for group in self.groups.values() for option in group])


def request_of(
    flavour: FlavourName,
    program: Program,
    options: Iterable[Option],
    values: Mapping[str, Any],
    **own: Any,
) -> Request:
    """The request of these values, by their options.

    ``own``: fields that no single option fills, by the name of their part, such as
    ``signals={"stop": (15,)}``, and fields of the request itself.
    """
    parts: dict[str, dict[str, Any]] = {"": {}}
    for option in options:
        if option.into and option.dest in values:
            value = values[option.dest]
            if values[option.given] if option.given else value not in UNSAID or value != option.default:
                part, _, name = option.into.rpartition(".")
                fields = parts.setdefault(part, {})
                fields[name] = value if option.make is None else option.make(value)
    for name, value in own.items():
        if isinstance(value, dict):
            parts.setdefault(name, {}).update(value)
        else:
            parts[""][name] = value
    top = parts.pop("")
    made = {part: type(getattr(Request, part))(**fields) for part, fields in parts.items()}
    return Request(flavour, program, **made, **top)


def dashed(name: str) -> str:
    """The spelling with dashes."""
    return name.replace("_", "-")


def switch(text: str) -> bool:
    """The value of a flag in the environment: a number, where 0 stands for a flag that is not given."""
    number = parse_integer(text)
    if number is None:
        raise BadValueError(f"invalid value: {quote(text)}, expected 0 or 1")
    return bool(number)


def flag(origin: Origin, spelled: str, text: str, *, is_slip: bool = False, into: str = "") -> Option:
    """An option without a value. ``text``: its line of the help."""
    return Option(origin, spelled, "", text, False, switch, is_slip=is_slip, into=into, is_flag=True)


def integer(text: str) -> int:
    """A whole number. The plan checks its bounds, because it knows what the number counts."""
    number = parse_integer(text)
    if number is None:
        raise BadValueError(
            f"invalid int value: {quote(text)}, expected a whole number of at most {MOST_DIGITS} digits"
        )
    return number


def seconds(text: str, least: float = 0) -> float:
    """A duration in seconds, ``least`` or more."""
    duration_s = parse_seconds(text)
    if duration_s is None:
        raise BadValueError(f"invalid seconds value: {quote(text)}, expected a number such as 30 or 0.5")
    if not least <= duration_s <= MOST_SECONDS:
        raise BadValueError(f"must be {least:g} or more seconds: {quote(text)}, and at most {MOST_SECONDS}")
    return duration_s


def seconds_or_never(text: str) -> float | None:
    """A duration in seconds; None for ``never``."""
    return None if text == "never" else seconds(text)


def byte_size(text: str) -> int:
    """A size in bytes, at least 64K, with an optional K, M or G (powers of 1024)."""
    size = parse_size(text)
    if size is None or not SMALLEST_LOG <= size <= LARGEST_LOG:
        raise BadValueError(
            f"must be a size of at least 64K, such as 512K, 100M or 2G, and at most 1048576G: {quote(text)}"
        )
    return size


def unquoted(text: str) -> str:
    """A text without a pair of quotes around it, which a YAML file or a batch script has left there."""
    is_quoted = text[:1] in ("'", '"') and text[-1] == text[0] and text.count(text[0]) == 2
    return text[1:-1] if is_quoted else text


def filled(expected: str) -> Callable[[str], str]:
    """A reader of text. Empty text is refused as a mistake, like in torchrun; ``expected``: what to write."""

    def read(text: str) -> str:
        if not text:
            raise BadValueError(f"expected {expected}, but it is empty")
        return unquoted(text)

    return read


def variable(text: str) -> str:
    """The name of a variable, a pattern for names, or NAME=VALUE."""
    if not text.partition("=")[0].strip() or "\0" in text:
        raise BadValueError(f"expected NAME, NAME=VALUE or a pattern such as 'WANDB_*', not {quote(text)}")
    return text


def _codes(text: str) -> tuple[int, ...]:
    """The exit codes of failures."""
    from dsl.model.codes import parse_codes

    if (codes := parse_codes(text)) is None:
        raise BadValueError(f"expected a list such as 1,3-5,signal,SIGKILL, or any: {quote(text)}")
    return codes


def _not_numa(text: str) -> str:
    """A text that does not ask for what there was before."""
    if text == "numa":
        raise BadValueError("numa is gone, leave the option out: all workers of a node share a fork server")
    return text


def text_or_none(text: str) -> str | None:
    """A text; None if it is empty."""
    return text or None


def count_or_none(count: int) -> int | None:
    """A number; None if it is negative, which stands for "not given" in DeepSpeed."""
    return None if count < 0 else count


def names(text: str) -> tuple[str, ...]:
    """The names in a list."""
    return tuple([name.strip() for name in text.split(",")])


_STREAMS = filled("0, 1, 2 or 3, or a list such as 0:1,rank12:3")

COMMON = {
    "ending": (
        Option(
            TORCHRUN, "--grace --shutdown-timeout", "SECONDS",
            "time between asking the workers to stop and killing them", DEFAULT_GRACE_S, read=seconds,
            own_names=("--grace",), into="signals.grace_s", bounds=SECONDS,
        ),
        Option(
            OURS, "--preempt-signal", "SIGNAL",
            "signal by which a scheduler announces the end: passed on, for a checkpoint",
        ),
        Option(
            OURS, "--preempt-grace", "SECONDS", "time for that checkpoint (default: --grace)", read=seconds,
            into="signals.preempt_grace_s",
        ),
        Option(
            OURS, "--signal-scope", "",
            "who hears signals: the worker, then its helpers; or at once its process group "
            "(default: rank, and group for programs)",
            choices=("rank", "group"), into="signals.scope",
        ),
        Option(
            OURS, "--restart-on", "CODES|signal|any",
            "failures after which workers are started again, such as 1,3-5,SIGKILL (default: any)",
            read=_codes, into="policy.restart_on",
        ),
        Option(
            OURS, "--give-up-on", "CODES|signal",
            "failures after which the job ends at once, whatever restarts are left",
            read=_codes, into="policy.give_up_on",
        ),
    ),
    "starting workers": (
        Option(
            OURS, "-x --env", "NAME[=VALUE]",
            "a variable for the workers of all hosts; NAME: as it is here; 'NAME_*': all that match; "
            "may be given several times",
            (), read=variable, into="variables", repeats=True,
        ),
        Option(
            TORCHRUN, "--start-method", "",
            "how workers get their imports; forkserver: import once, then fork the workers; "
            "warm: keep that for the next start; auto: where that pays; the others: execute each",
            "spawn", choices=("spawn", "fork", "forkserver", "warm", "auto"), into="start.method",
        ),
        Option(
            OURS, "--preload", "MODULE,...",
            "what a fork server imports (default: what the script imports and is installed)", "",
            into="start.preload", make=names,
        ),
        Option(
            OURS, "--warm-for", "SECONDS",
            "how long a warm fork server stays after its last job (default: 600)", read=seconds,
            into="start.warm_for_s", bounds=SECONDS,
        ),
        Option(
            OURS, "--warm-memory", "SIZE",
            "end idle warm fork servers if all together use more memory (default: 8G)", read=byte_size,
            into="start.warm_memory", bounds=(1, LARGEST_LOG),
        ),
        Option(
            OURS, "--wrap", "RANKS:COMMAND",
            "put a command before those of some global ranks: '0,8-15:nsys profile'; may be repeated", (),
            into="start.wraps", repeats=True,
        ),
        Option(
            OURS, "--fork-server-per", "", "has no effect: all workers of a node share a fork server",
            "node", read=_not_numa, choices=("node",),
        ),
    ),
    "output": (
        Option(
            TORCHRUN, "--log-dir", "DIR",
            "keep each worker's output in files; these lie in a new directory in DIR",
            into="output.log_dir", make=text_or_none,
        ),
        Option(
            TORCHRUN, "-r --redirects", "MAP",
            "streams that go to files only: 0-3, or a list of local and global ranks: 0:1,rank12:3",
            read=_STREAMS, into="output.redirects",
        ),
        Option(
            TORCHRUN, "-t --tee", "MAP", "streams that go to files and to the console", read=_STREAMS,
            into="output.tee",
        ),
        Option(
            TORCHRUN, "--local-ranks-filter", "RANKS", "local ranks that the console shows, such as 0,2", "",
            into="output.local_ranks",
        ),
        Option(
            OURS, "--ranks-filter", "RANKS",
            "global ranks that the console shows, such as 0,8-15", "", into="output.global_ranks",
        ),
        Option(
            TORCHRUN, "--duplicate-stdout-filters", "WORDS",
            "copy lines of stdout that hold one of these words to filtered_stdout.log", "", is_text=True,
            into="output.stdout_words",
        ),
        Option(
            TORCHRUN, "--duplicate-stderr-filters", "WORDS",
            "copy lines of stderr that hold one of these words to filtered_stderr.log", "", is_text=True,
            into="output.stderr_words",
        ),
        Option(
            OURS, "--tag-output", "",
            "put the rank before each line; auto: on a terminal, if there are several workers", "auto",
            choices=("auto", "always", "never"), into="output.tag",
        ),
        Option(
            TORCHRUN, "--log-line-prefix-template", "TEXT",
            "put before each line on the console: ${role_name}, ${rank}, ${local_rank}, ${host}, ${time}", "",
            is_text=True, into="output.template",
        ),
        flag(
            OURS, "--collapse", "show equal lines of several workers once, with a count",
            into="output.collapse",
        ),
        Option(
            OURS, "--partial-after", "SECONDS|never",
            "show an unfinished line after so long without more of it, where there is no terminal",
            DEFAULT_PARTIAL_S, read=seconds_or_never, into="output.partial_after_s", bounds=SECONDS,
        ),
        Option(
            OURS, "--stdin", "RANK|none",
            "the worker that reads stdin (default: the first on this node)", "", into="output.stdin",
        ),
        Option(
            OURS, "--log-max-size", "SIZE",
            "keep the first and the last part of each log file, SIZE in all, such as 100M", read=byte_size,
            into="output.max_bytes",
        ),
    ),
    "cores and memory": (
        Option(
            OURS, "--bind", "",
            "bind each worker to cores of its own; auto: beside its device if it has one", "none",
            choices=("auto", "none"), into="placement.bind",
        ),
        flag(
            OURS, "--bind-strict", "with --bind auto: refuse rather than let workers share",
            into="placement.strict",
        ),
        Option(
            OURS, "--mem-policy", "",
            "memory policy of workers that are bound, on the NUMA nodes of their cores",
            choices=("preferred", "bind", "interleave", "local", "none"), into="placement.memory",
        ),
        flag(
            OURS, "--report-bindings", "show each worker's device, cores and memory on stderr",
            into="show.bindings",
        ),
    ),
    "debugging": (
        Option(
            OURS, "--debug", "RANKS",
            "run these workers under debugpy, such as --debug=1 or --debug=0,2-3; without a value all",
            read=filled("ranks such as 1 or 0,2-3, or all"), bare="all", into="debug.ranks",
        ),
        Option(
            OURS, "--debug-port", "PORT",
            "port of each node's first worker; the others follow", DEFAULT_DEBUG_PORT, read=integer,
            into="debug.port", bounds=PORTS,
        ),
        Option(
            OURS, "--debug-address", "ADDRESS", "address where they listen", DEFAULT_DEBUG_ADDRESS,
            into="debug.address",
        ),
        flag(OURS, "--debug-wait", "begin when a debugger has attached", into="debug.waits"),
    ),
    "seeing into the job": (
        flag(
            OURS, "--detach",
            "run the job in the background; dsl-attach follows its output, dsl-wait has its exit code",
            is_slip=True, into="detaches",
        ),
        flag(
            OURS, "--stacks-on-failure",
            "when a rank fails, report what the other ranks do before they are stopped, 3 s later at most",
            into="stacks_on_failure",
        ),
        Option(
            OURS, "--hang-timeout", "SECONDS",
            "the job hangs if no rank makes progress for so long: name the ranks that differ",
            read=lambda text: seconds(text, LEAST_HANG_S), into="hang_timeout_s",
            bounds=(LEAST_HANG_S, MOST_SECONDS),
        ),
        Option(
            OURS, "--hang-action", "",
            "what follows: the job goes on, is stopped, or its odd ranks are ended as if they had failed",
            "report", choices=("report", "stop", "restart"), into="hang_action",
        ),
        Option(
            OURS, "--events", "FILE", "append what happens to the job to FILE, as lines of JSON",
            into="events",
        ),
        Option(
            OURS, "--metrics", "[HOST:]PORT|FILE",
            "figures of the job for Prometheus: at http://HOST:PORT/metrics (HOST: 127.0.0.1), or in FILE",
            into="metrics",
        ),
    ),
    "showing the plan": (
        flag(
            OURS, "--strict",
            "refuse every fallback; these are options without effect, hosts or devices that are not there",
            into="is_strict",
        ),
        flag(
            OURS, "--doctor", "look for what would go wrong on the hosts of the job, and start nothing",
            into="show.doctor",
        ),
        flag(
            OURS, "--ring", "with --doctor: measure all_reduce and the links between the hosts, with torch",
            into="show.ring",
        ),
        flag(
            OURS, "--doctor-first",
            "look for it on each host before the first attempt; an error of the doctor ends the job",
            into="show.doctor_first",
        ),
        flag(OURS, "--dry-run", "show what would be started, and start nothing", into="show.dry_run"),
        flag(OURS, "--dry-run-json", "the same as one JSON object", into="show.dry_run_json"),
    ),
}  # fmt: skip
"""Options of dsl and torchrun that both commands have."""
