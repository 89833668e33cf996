"""The options of the commands: DeepSpeed's of every version, and ours, which both commands share."""

from __future__ import annotations

import argparse
import os

from dsl.errors import NumNodesError
from dsl.model.request import (
    DEFAULT_GRACE_S,
    DEFAULT_HOSTFILE,
    DEFAULT_MASTER_PORT,
    LEVELS,
    OutputRequest,
    PlacementRequest,
)
from dsl.resources.filters import parse_num_nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn


SMALLEST_LOG = 64 * 1024
LARGEST_LOG = 1 << 50


class HelpFormatter(argparse.HelpFormatter):
    """Help with defaults, as wide as the terminal."""

    def __init__(self, prog: str) -> None:
        # Without a width argparse imports shutil to learn it, whenever an option is added.
        super().__init__(prog, max_help_position=32, width=_terminal_width())

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # One spelling of a word is enough to read, and its value once.
        names = list(action.option_strings)
        shown = [name for name in names if not ("_" in name and _dashed(name) in names)]
        if not names or action.nargs == 0:
            return ", ".join(shown) if names else super()._format_action_invocation(action)
        return f"{', '.join(shown)} {self._format_args(action, action.dest.upper())}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, "", -1, "None", argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if shown else action.help


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _terminal_width() -> int:
    try:
        columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size().columns
    except (ValueError, OSError):
        columns = 80
    return max(columns - 2, 40)


class _GivenAction(argparse.Action):
    """Store the value, and in ``NAME_given`` that it was given: a default that is spelled out is a wish."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002  the signature is argparse's
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,  # noqa: ARG002  as above
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


class Parser(argparse.ArgumentParser):
    """A parser for ``OPTIONS SCRIPT ARGUMENTS`` that never looks at what follows the script.

    argparse alone does: it refuses ``train.py --n 3`` because ``--n`` could stand for several of its options.
    """

    def __init__(self, prog: str, usage: str, description: str, rest: str = "user_args") -> None:
        super().__init__(prog=prog, usage=usage, description=description, formatter_class=HelpFormatter)
        self._whole: set[str] = set()
        self._rest = rest

    def never_shorten(self, action: argparse.Action) -> None:
        """Take the long spellings of an option only as they are, so that others can still be shortened."""
        self._whole.update(option for option in action.option_strings if option.startswith("--"))

    def allow_shortening(self, option: str) -> None:
        """Take back `never_shorten` for one spelling and its sister with underscores."""
        self._whole.difference_update(spellings(option))

    def option(self, name: str) -> argparse.Action:
        """The option of that spelling."""
        return self._option_string_actions[name]

    def actions(self) -> list[argparse.Action]:
        """All options but ``--help``."""
        return [action for action in self._actions if action.option_strings and action.dest != "help"]

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # Asked only for a word that is no option as it stands.
        found: list[Any] = super()._get_option_tuples(option_string)
        found = [
            item for item in found if item[1] not in self._whole or item[1] == option_string.partition("=")[0]
        ]
        # Two spellings of one option are no reason to ask back.
        return found[:1] if len({id(item[0]) for item in found}) == 1 else found

    def error(self, message: str) -> NoReturn:
        """End with 2 and one line; an option that does not exist is likely to be a slip of one that does."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            from difflib import get_close_matches

            flag = unknown.split()[0].partition("=")[0]
            near = get_close_matches(flag, self._option_string_actions, 1)
            message = f"{message}, did you mean {near[0]}?" if near else f"{message}, see {self.prog} --help"
        super().error(message)

    def parse_script_args(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse up to the script; what follows is kept unchanged. Exits with 2 for bad usage.

        As with argparse, the first ``--`` is a separator if it stands before the script or right after it.
        """
        end = self._find_script(argv) + 1
        own, rest = argv[:end], argv[end:]
        namespace = self.parse_args(own)
        follows = rest[1:] if rest[:1] == ["--"] and "--" not in own else rest
        setattr(namespace, self._rest, list(follows))
        return namespace

    def _find_script(self, argv: Sequence[str]) -> int:
        """Index of the first word that is neither an option nor its value. Faults are left to argparse."""
        index = 0
        while index < len(argv):
            word = argv[index]
            if word == "--":
                return index + 1
            action, has_value = self._read_option(word)
            if action is None and (word[:1] != "-" or word == "-" or self._is_value(word)):
                return index
            takes_next = action is not None and action.nargs is None and not has_value
            index += 2 if takes_next else 1
        return index

    def _is_value(self, word: str) -> bool:
        return " " in word or self._negative_number_matcher.match(word) is not None

    def _read_option(self, word: str) -> tuple[argparse.Action | None, bool]:
        """The last option that argparse sees in a word, if any, and whether the word holds its value too."""
        actions = self._option_string_actions
        name, equals, _ = word.partition("=")
        if name in actions:
            return actions[name], bool(equals)
        if name.startswith("--"):
            matches = [
                action
                for option, action in actions.items()
                if option.startswith(name) and option not in self._whole
            ]
            return (matches[0] if len(set(map(id, matches))) == 1 else None), bool(equals)
        action = None
        if word[:1] == "-":
            for index, letter in enumerate(word[1:], start=2):  # flags may be joined: -qH PATH
                action = actions.get(f"-{letter}")
                if action is None or action.nargs is None:
                    return action, index < len(word)
        return action, False


def node_count(text: str) -> int | str:
    """``N`` as a number; ``MIN:MAX`` as it stands, until it is known whether the job is elastic."""
    try:
        least, _ = parse_num_nodes(text, elastic_training=True)
    except NumNodesError:
        raise argparse.ArgumentTypeError(f"invalid int value, nor MIN:MAX: {text!r}") from None
    return text if ":" in text else least


def seconds(text: str) -> float:
    """A duration in seconds, zero or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more seconds: {text!r}")
    return value


def byte_size(text: str) -> int:
    """A size in bytes with an optional K, M or G (of 1024), from 64K to what no disk holds."""
    number, factor = text, 1
    if text[-1:].upper() in ("K", "M", "G"):
        number, factor = text[:-1], 1024 ** ("KMG".index(text[-1].upper()) + 1)
    is_number = number.isascii() and number.isdecimal() and len(number) <= len(str(LARGEST_LOG))
    size = int(number) * factor if is_number else 0
    if not SMALLEST_LOG <= size <= LARGEST_LOG:
        raise argparse.ArgumentTypeError(
            f"must be a size of at least 64K, such as 512K, 100M or 2G, and at most 1048576G: {text!r}"
        )
    return size


def spellings(*names: str) -> list[str]:
    """Names of an option, the long ones with dashes and with underscores."""
    other = [name.replace("-", "_").replace("__", "--", 1) for name in names if name.startswith("--")]
    return list(dict.fromkeys((*names, *other)))


def add_common_options(parser: Parser) -> None:
    """Options of ours and of torchrun, the same in every command. None can be shortened."""
    group = parser.add_argument_group("ending")

    def add(*names: str, **facts: Any) -> None:
        parser.never_shorten(group.add_argument(*spellings(*names), **facts))

    add(
        "--grace",
        "--shutdown-timeout",
        type=seconds,
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help="time between asking the workers to stop and killing them",
    )
    group = parser.add_argument_group("output")
    add("--log-dir", metavar="DIR", help="write each worker's output to files below a new directory in DIR")
    add("-r", "--redirects", default="", metavar="MAP", help="streams that go to files only: 0-3, or 0:1,2:3")
    add("-t", "--tee", default="", metavar="MAP", help="streams that go to files and to the console")
    add(
        "--local-ranks-filter",
        default="",
        metavar="RANKS",
        help="local ranks that the console shows, such as 0,2",
    )
    for stream in ("stdout", "stderr"):
        add(
            f"--duplicate-{stream}-filters",
            default="",
            metavar="WORDS",
            help=f"copy lines of {stream} that hold one of these words to filtered_{stream}.log",
        )
    add(
        "--tag-output",
        choices=["auto", "always", "never"],
        default="auto",
        help="put the rank before each line; auto: on a terminal, if there are several workers",
    )
    add("--collapse", action="store_true", help="show equal lines of several workers once, with a count")
    add("--stdin", default="", metavar="RANK", help="the worker that reads stdin; none: nobody")
    add(
        "--log-max-size",
        type=byte_size,
        metavar="SIZE",
        help="keep the first and the last part of each log file, SIZE in all, such as 100M",
    )
    group = parser.add_argument_group("cores and memory")
    add(
        "--bind",
        choices=["auto", "none"],
        default="none",
        help="auto: bind each worker to cores of its own, beside its device if it has one",
    )
    add("--bind-strict", action="store_true", help="with --bind auto: refuse rather than let workers share")
    add(
        "--mem-policy",
        choices=["preferred", "bind", "interleave", "local", "none"],
        default=None,
        help="memory policy of workers that are bound, on the NUMA nodes of their cores",
    )
    add(
        "--report-bindings", action="store_true", help="show each worker's device, cores and memory on stderr"
    )
    group = parser.add_argument_group("showing the plan")
    add("--dry-run", action="store_true", help="show what would be started, and start nothing")
    add("--dry-run-json", action="store_true", help="the same as one JSON object")


def add_script(parser: Parser, script: str, rest: str) -> None:
    """The script and all that comes after it, as ``script`` and ``rest`` of the namespace."""
    parser.add_argument(script, metavar="SCRIPT", help="what each worker runs")
    action = parser.add_argument(
        rest, nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="passed on as they are"
    )
    action.required = False


def output_request(options: argparse.Namespace) -> OutputRequest:
    """What the options of `add_common_options` ask for."""
    return OutputRequest(
        log_dir=options.log_dir or None,
        redirects=options.redirects,
        tee=options.tee,
        local_ranks=options.local_ranks_filter,
        stdout_words=options.duplicate_stdout_filters,
        stderr_words=options.duplicate_stderr_filters,
        tag=options.tag_output,
        collapse=options.collapse,
        stdin=options.stdin,
        max_bytes=options.log_max_size,
    )


def placement_request(options: argparse.Namespace) -> PlacementRequest:
    """What the options of `add_common_options` ask for about cores and memory."""
    return PlacementRequest(
        bind=options.bind,
        memory=options.mem_policy,
        strict=options.bind_strict,
        names_devices=options.report_bindings or options.dry_run or options.dry_run_json,
    )


def add_resource_options(parser: argparse.ArgumentParser) -> None:
    """DeepSpeed's choice of hosts, slots and meeting point."""
    add = parser.add_argument_group("where to run").add_argument
    add(
        "-H",
        "--hostfile",
        type=str,
        default=DEFAULT_HOSTFILE,
        metavar="PATH",
        help="file of lines 'HOST slots=N'; without it the job runs on this machine",
    )
    add("-i", "--include", type=str, default="", metavar="FILTER", help="use only HOST[:SLOT,...][@HOST...]")
    add(
        "-e",
        "--exclude",
        type=str,
        default="",
        metavar="FILTER",
        help="use all but HOST[:SLOT,...][@HOST...]",
    )
    add(
        "--num_nodes",
        type=node_count,
        default=-1,
        metavar="N",
        help="use the first N hosts; MIN:MAX if elastic",
    )
    add("--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N", help="workers on each host")
    add(
        "--master_port",
        action=_GivenAction,
        type=int,
        default=DEFAULT_MASTER_PORT,
        metavar="PORT",
        help="where the workers meet; another is chosen if the default is taken, 0 chooses always",
    )
    parser.set_defaults(master_port_given=False)
    add("--master_addr", type=str, default="", metavar="ADDRESS", help="address of the first host")
    add("--min_elastic_nodes", type=int, default=-1, metavar="N", help="with --elastic_training")
    add("--max_elastic_nodes", type=int, default=-1, metavar="N", help="with --elastic_training")
    add("--elastic_training", action="store_true", help="let nodes join and leave")
    add("--autotuning", type=str, default="", choices=["tune", "run"], help="look for the best configuration")


def add_remote_options(parser: argparse.ArgumentParser) -> None:
    """DeepSpeed's ways to reach other hosts."""
    add = parser.add_argument_group("several hosts").add_argument
    add(
        "--no_ssh",
        action="store_true",
        help="start only this host's workers; the same command runs on each host",
    )
    add("--node_rank", type=int, default=-1, metavar="RANK", help="with --no_ssh: place of this host, from 0")
    add("--no_ssh_check", action="store_true", help="do not try the hosts first")
    add("--force_multi", action="store_true", help="treat even one host as remote")
    add(
        "--launcher",
        type=str,
        default="pdsh",
        metavar="NAME",
        help="pdsh, openmpi, mvapich, slurm, mpich, impi",
    )
    add("--launcher_args", type=str, default="", metavar="WORDS", help="more arguments for the launcher")
    add("--ssh_port", type=int, default=None, metavar="PORT", help="port of the hosts' ssh servers")
    add("--venv_script", type=str, default=None, metavar="PATH", help="script to source on each host first")


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """DeepSpeed's choice of what a worker is."""
    add = parser.add_argument_group("workers").add_argument
    add("--module", action="store_true", help="run the script as 'python -m' does")
    add("--no_python", action="store_true", help="run the script itself, without python")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    add("--bind_cores_to_rank", action="store_true", help="give each worker its own cores and their memory")
    add(
        "--bind_core_list",
        type=str,
        default=None,
        metavar="LIST",
        help="the cores to give, such as 0-27,32-59",
    )
    add(
        "--enable_each_rank_log",
        type=str,
        default="None",
        metavar="DIR",
        help="write the output of each worker to its own file here",
    )
    add("--save_pid", action="store_true", help="keep the pid of the supervisor in TMPDIR/PID.deepspeed")
    add(
        "--log_level",
        type=str,
        default="info",
        choices=list(LEVELS),
        help="how much dsl says about what it does",
    )
    add("-q", "--quiet", action="store_true", help="the same as --log_level error")


def deepspeed_parser(prog: str) -> Parser:
    """The parser of DeepSpeed's runner: every flag of every version, with its default."""
    parser = Parser(
        prog,
        usage="%(prog)s [OPTIONS] SCRIPT [ARGUMENTS]",
        description="Run a training script on every slot of this machine, or of several.",
    )
    add_resource_options(parser)
    add_remote_options(parser)
    add_worker_options(parser)
    add_common_options(parser)
    add_script(parser, "user_script", "user_args")
    return parser
