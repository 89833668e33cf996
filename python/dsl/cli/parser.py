"""Reads a command line with argparse, when `dsl.cli.command` declines it: help, mistakes, abbreviations."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from dsl.cli.command import complete, is_free_text, variables_of
from dsl.cli.tool import AtOnce, ToolParser, show_help, terminal_size, without_sisters
from dsl.errors import OptionError
from dsl.model.job import Notice
from dsl.model.options import DEEPSPEED, OURS, SHELLS, TORCHRUN, BadValueError, dashed, filled
from dsl.words import shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import NoReturn

    from dsl.model.options import CommandLine, Option, Origin

DOCS = "https://github.com/dsl-project/dsl/blob/main/docs"

EXAMPLES = {
    DEEPSPEED: (
        ("train.py --lr 1e-3", "a worker for each device of this machine"),
        ("--num_gpus 2 train.py", "two workers"),
        ("--hostfile hosts train.py", "workers on each host of the file"),
    ),
    TORCHRUN: (
        ("--nproc-per-node 4 train.py --lr 1e-3", "four workers"),
        ("--nproc-per-node gpu train.py", "one for each GPU"),
        ("--nnodes 2 --node-rank 0 --master-addr n0 train.py", "node 0 of 2"),
    ),
}
"""Example arguments of each command, and what they start."""

_ALSO_BRIEF = ("module", "max_restarts", "log_dir", "bind", "start_method", "strict", "dry_run")
BRIEF = {
    DEEPSPEED: ("num_gpus", "include", "hostfile", "num_nodes", "no_python", *_ALSO_BRIEF),
    TORCHRUN: ("nproc_per_node", "nnodes", "node_rank", "master_addr", "no_python", *_ALSO_BRIEF),
}
"""The values whose options stand in the short help, which fits on one screen."""

_ALSO_USUAL = (
    *("module", "no_python", "max_restarts", "grace", "preempt_signal", "env", "start_method", "wrap"),
    *("log_dir", "redirects", "tee", "ranks_filter", "bind", "report_bindings", "debug"),
    *("detach", "hang_timeout", "hang_action", "events", "metrics", "strict", "doctor", "dry_run"),
)
USUAL = {
    DEEPSPEED: (
        *("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_port", "master_addr"),
        *("elastic_training", "autotuning", "launcher", "no_ssh", "node_rank", "wait_hosts"),
        *_ALSO_USUAL,
    ),
    TORCHRUN: (
        *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "standalone"),
        *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "virtual_local_rank", "local_ranks_filter"),
        *_ALSO_USUAL,
    ),
}
"""The values whose options stand in `--help`: what people need. `--help-all` shows the others, too."""

EXIT_CODES = (
    "The exit code is 0 if every worker has ended with 0; else that of the worker that failed first, 128 + N "
    "for signal N; 127 or 126 if the program cannot be executed; 2 for bad usage; 130 or 143 if you have "
    "interrupted or terminated the job."
)

LONGEST_VALUE = 12
"""How long what an option takes may be in the short help, in characters."""

MOST_TOLD = 5
"""Most unknown options that an error message lists."""

IN_PLACE: dict[str, tuple[str, dict[str, Any]]] = {
    "--completion": (
        "show the script by which a shell completes all commands of dsl, and exit",
        {"nargs": None, "choices": SHELLS},
    ),
    "--stand-in": ("run a program in which torchrun, deepspeed and torch's modules for them are ours", {}),
    "--make-links": (
        "make links named torchrun and deepspeed to our commands in DIR, and exit",
        {"nargs": None, "metavar": "DIR", "type": filled("a directory")},
    ),
}
"""Options in place of a job, which stand alone, with their help; see `dsl.cli.command.Command.answers`."""

_UNSAID = object()
"""Stands for the value of an option that the command line does not have."""


class Parser(ToolParser):
    """A parser for ``OPTIONS SCRIPT ARGUMENTS`` that never reads the words after the script.

    Plain argparse does: it refuses ``train.py --n 3`` because ``--n`` could stand for several of its options.
    """

    def __init__(self, line: CommandLine, environ: Mapping[str, str] | None = None) -> None:
        """``environ`` may have defaults of options. They are read only if the command line has none."""
        super().__init__(line.program, "[OPTIONS] SCRIPT [ARGUMENTS]", line.description, EXIT_CODES)
        self._whole: set[str] = set()
        """Spellings that cannot be shortened, so that abbreviations of others stay unambiguous."""
        self.origin = line.origin
        """The tool that the command replaces."""
        for title, options in line.groups.items():
            group = self.add_argument_group(title)
            for option in options:
                group.add_argument(*option.names, **_facts(option))
                whole = option.names if option.origin != line.origin else option.own_names
                self._whole.update([name for name in whole if name[:2] == "--" or option.origin == OURS])
        self.add_argument(
            "-h", action=AtOnce, do=lambda _: show_help(self.format_brief()),
            help="show what most jobs need, and exit",
        )  # fmt: skip
        self.add_argument(
            "--help", action=AtOnce, do=lambda _: show_help(self.format_usual()),
            help="show what people use, and exit",
        )  # fmt: skip
        self.add_standard("--help-all", text="show all options, and exit")
        for name, (text, facts) in IN_PLACE.items():
            names = dict.fromkeys((name, f"--{name[2:].replace('-', '_')}"))
            self.add_argument(*names, action=AtOnce, do=partial(self._refuse, name), help=text, **facts)
            self._whole.update(names)
        self._whole.update(("--help-all", "--version"))
        self.add_argument(line.script, metavar="SCRIPT", help="what each worker runs")
        action = self.add_argument(
            line.rest, nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="passed on as they are"
        )
        action.required = False
        self._unknown: list[str] = []
        """The unknown options of the last command line."""
        self._line, self._environ = line, environ or {}
        self._texts = {option.dest for option in line.options if option.is_text}
        self._inherited: dict[str, str] = {}
        """Values of the last command line that are from the environment, each with its variable."""
        for dest, variable in variables_of(line, self._environ).items():
            self.set_defaults(**{dest: f"{self._environ[variable]}, from {variable}"})  # for the help
        self._defaults_of_ours = {option.dest: self.get_default(option.dest) for option in line.options}

    def format_brief(self) -> str:
        """Help for one screen."""
        chosen = {action.dest: action for action in self._actions}
        options = _in_columns([_brief_row(chosen[dest]) for dest in BRIEF[self.origin]])
        return (
            f"{self.format_usage()}\n{self.description}\n\n{self._format_examples()}\n{options}\n"
            f"{self.prog} --help shows more options, --help-all shows all; their page is\n"
            f"{DOCS}/{self.prog}.md\n"
        )

    def format_usual(self) -> str:
        """Help with the options that people use, by groups, each in a few words."""
        chosen = {action.dest: action for action in self._actions}
        groups = {
            title: [_brief_row(chosen[one.dest]) for one in options if one.dest in USUAL[self.origin]]
            for title, options in self._line.groups.items()
        }
        width = max(len(left) for rows in groups.values() for left, _ in rows)
        shown = [f"{title}:\n{_in_columns(rows, width)}\n" for title, rows in groups.items() if rows]
        return (
            f"{self.format_usage()}\n{self.description}\n\n{self._format_examples()}\n{''.join(shown)}"
            f"{self.prog} --help-all shows all options, with defaults; their page is\n{DOCS}/{self.prog}.md\n"
        )

    def _format_examples(self) -> str:
        return _in_columns([(f"{self.prog} {words}", text) for words, text in EXAMPLES[self.origin]])

    def _refuse(self, name: str, value: object) -> NoReturn:
        # A command line that has it alone never gets here.
        self.error(f"{name} stands alone, as in {self.prog} {name} {value or '-- yolo train'}")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse; values from the environment are read, too. Exits with 2 for bad values."""
        found = argparse.Namespace() if namespace is None else namespace
        for option in self._line.options:
            is_theirs = self.get_default(option.dest) is not self._defaults_of_ours[option.dest]
            if not hasattr(found, option.dest) and not is_theirs:  # a default that the program has set counts
                setattr(found, option.dest, _UNSAID)
        found, rest = super().parse_known_args(args, found)
        given = {name: value for name, value in vars(found).items() if value is not _UNSAID}
        inherited = variables_of(self._line, self._environ)
        self._inherited = {dest: name for dest, name in inherited.items() if dest not in given}
        try:
            vars(found).update(complete(self._line, given, self._environ))
        except BadValueError as error:
            self.error(str(error))
        return found, rest

    def name_variables(self, argv: Sequence[str], message: str) -> str:
        """Add to a message about options the names of the variables that have set them, if any."""
        self.parse_script_args(argv)
        words = set(message.replace(":", " ").replace(",", " ").split())
        found = []
        for option in self._line.options:
            named = [name for name in option.names if name in words]
            if option.dest in self._inherited and named:
                found.append(f"{named[0]} is from {self._inherited[option.dest]}")
        return f"{message} ({', '.join(found)})" if found else message

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse calls this only for a word that is not exactly an option.
        found: list[Any] = super()._get_option_tuples(option_string)
        found = [
            item for item in found if item[1] not in self._whole or item[1] == option_string.partition("=")[0]
        ]
        # Two spellings of the same option are not ambiguous.
        return list({id(item[0]): item for item in reversed(found)}.values())[::-1]

    def error(self, message: str) -> NoReturn:
        """End with 2 and one line. For an unknown option, it names the one you probably mean."""
        subject, _, rest = message.partition(": ")
        names = subject.removeprefix("argument ")
        if rest == "SCRIPT":  # it is missing
            missing = f"{message}, see {self.prog} -h"
            message = f"unrecognized arguments: {' '.join(self._unknown)}" if self._unknown else missing
        elif names != subject:
            shown = without_sisters(names.split("/"))
            message = f"argument {'/'.join(shown)}: {rest}"
            is_text = self._option_string_actions[shown[-1]].dest in self._texts
            if rest == "expected one argument" and is_text:
                message += f", one that begins with a dash stands behind =, as in {shown[-1]}=-x"
        super().error(message)

    def advise(self, unknown: str) -> str:
        """Unknown options, each with a hint at what the user probably meant."""
        words = list(dict.fromkeys(unknown.split()))[:MOST_TOLD]
        parts = [(shorten(word), self._hint(word)) for word in words]
        if not parts[-1][1]:
            parts[-1] = (parts[-1][0], f"see {self.prog} --help")
        return "; ".join(", ".join(filter(None, part)) for part in parts)

    def _hint(self, word: str) -> str:
        return hint(word.partition("=")[0], self.origin, self._option_string_actions)

    def parse_script_args(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse up to the script, and keep the words after it unchanged. Exits with 2 for bad usage.

        As in argparse, the first ``--`` is a separator if it comes before the script or right after it.
        """
        if not argv:
            self.print_usage(sys.stderr)
            what = f"the following arguments are required: SCRIPT, see {self.prog} -h"
            self.exit(2, f"{self._format_examples()}{self.prog}: error: {what}\n")
        own, rest = self._split(argv)
        self._unknown = self._find_unknown(argv)
        namespace, unknown = self.parse_known_args(own)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(self._unknown or unknown)}")
        follows = rest[1:] if rest[:1] == ["--"] and "--" not in own else rest
        setattr(namespace, self._line.rest, follows)
        return namespace

    def _split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """Split the words: ours, up to and with the script, and the rest. argparse finds the mistakes later.

        A value that argparse would not read as the value of its option is joined to the option with ``=``.
        """
        own: list[str] = []
        words = iter(argv)
        for word in words:
            own.append(word)
            if word == "--":
                own += [script for script in [next(words, None)] if script is not None]
                break
            action, has_value = self._read_option(word)
            if action is None and self._is_value(word):
                break
            if action is None or has_value or action.nargs == 0:
                continue
            if action.nargs == "?":  # argparse would read the next word as its value
                own[-1] = f"{word}={action.const}"
            elif (text := next(words, None)) is not None:
                joined = action.dest in self._texts and text[:1] == "-"
                if joined and is_free_text(text, self._option_string_actions):
                    own[-1] = f"{word}={text}"
                else:
                    own.append(text)
        return own, list(words)

    def _find_unknown(self, argv: Sequence[str]) -> list[str]:
        """The unknown options, up to a word that may be the script or a value."""
        found: list[str] = []
        takes_next = False
        for word in argv:
            if word == "--" or (self._is_value(word) and not takes_next):
                break
            if self._is_value(word):
                takes_next = False
                continue
            action, has_value = self._read_option(word)
            if action is None:
                found.append(word)
                meant = self._hint(word).rstrip("?").split()
                action, has_value = self._option_string_actions.get(meant[-1] if meant else ""), "=" in word
            takes_next = action is not None and action.nargs is None and not has_value
        return found

    def _is_value(self, word: str) -> bool:
        """Whether argparse reads a word that is no option as a value."""
        is_number = self._negative_number_matcher.match(word) is not None
        return word[:1] != "-" or word == "-" or " " in word or is_number

    def _read_option(self, word: str) -> tuple[argparse.Action | None, bool]:
        """The last option that argparse finds in a word, if any, and whether the word contains its value."""
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
        if word[:1] == "-" and word[:2] not in self._whole:
            for index, letter in enumerate(word[1:], start=2):  # flags may be joined: -qH PATH
                action = actions.get(f"-{letter}")
                if action is None or action.nargs is None:
                    return action, index < len(word)
        return action, False


def _in_columns(rows: Sequence[tuple[str, str]], width: int = 0) -> str:
    """Lines of two columns, as wide as the terminal. ``width``: the least of the first one."""
    from textwrap import fill

    indent = " " * (max(width, *[len(left) for left, _ in rows]) + 4)
    columns = terminal_size()[0]
    return "".join(
        fill(text, columns, initial_indent=f"  {left}".ljust(len(indent)), subsequent_indent=indent) + "\n"
        for left, text in rows
    )


def _brief_row(option: argparse.Action) -> tuple[str, str]:
    """An option in the short help: its letter and one spelling, and its text up to the first semicolon."""
    long = next(name for name in option.option_strings if name.startswith("--"))
    name = ", ".join([*[name for name in option.option_strings if name[1] != "-"], long])
    words = str(option.metavar or "|".join(option.choices or ()))
    if len(words) > LONGEST_VALUE:
        words = "WORD" if words[0].islower() else words.partition("|")[0]
    text = (option.help or "").partition(";")[0].partition(" (default")[0]
    return name if option.nargs == 0 else f"{name} {words}", text


def _facts(option: Option) -> dict[str, Any]:
    """The arguments of `argparse.ArgumentParser.add_argument` for an option, besides its names."""
    facts: dict[str, Any] = {"help": option.help, "default": option.default}
    if option.is_flag:
        return {**facts, "action": "store_true"}
    facts.update(type=option.read, metavar=option.metavar or None)
    if option.bare is not None:
        facts.update(nargs="?", const=option.bare)
    if option.repeats:
        facts.update(action=Repeated)
    facts["choices"] = None if option.choices is None else list(option.choices)
    return facts


class Repeated(argparse.Action):
    """Adds a value to those that were given before."""

    def __call__(self, _parser: object, namespace: object, value: object, _name: str | None = None) -> None:
        """Keep one more value."""
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, (value,) if before is _UNSAID else (*before, value))


_NODES = "--nnodes, --node-rank and --master-addr, and start dslrun on each node"
_DEVICES = "CUDA_VISIBLE_DEVICES for the devices, and --nproc-per-node for their number"
_NODES_FILE = "--hostfile, and on each host --no_ssh --node_rank RANK --master_addr ADDRESS"
_PORT = "--master_addr and --master_port"
_NUMBERS = ("--num_gpus", "--nproc-per-node")

INSTEAD = {
    DEEPSPEED: {
        "nnodes": f"--num_nodes with {_NODES_FILE}",
        "nproc_per_node": "--num_gpus",
        "local_addr": "--master_addr",
        "standalone": "nothing to say: without a hostfile it meets nobody",
        **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"), _PORT),
        "run_path": "nothing to say: a script is run by a new interpreter",
        "numa_binding": "--bind auto or --bind_cores_to_rank",
        "local_rank_arg": "--no_local_rank, else each script gets --local_rank=N",
        "use_env": "--no_local_rank",
    },
    TORCHRUN: {
        **dict.fromkeys(("hostfile", "launcher", "launcher_args", "ssh_port", "venv_script"), _NODES),
        **dict.fromkeys(("include", "exclude"), _DEVICES),
        "num_nodes": "--nnodes",
        "num_gpus": "--nproc-per-node",
        **dict.fromkeys(("min_elastic_nodes", "max_elastic_nodes"), "--nnodes MIN:MAX"),
        **dict.fromkeys(("elastic_training", "discover"), "--nnodes MIN:MAX"),
        "elastic_wait": "--rdzv-conf join_timeout=SECONDS",
        "no_local_rank": "--local-rank-arg none, which is the default",
        **dict.fromkeys(("bind_cores_to_rank", "bind_core_list"), "--bind auto or --numa-binding"),
        "enable_each_rank_log": "--log-dir DIR --redirects 3",
        "quiet": "--log-level error",
    },
}
"""What each command has in place of options that only the other command has, by the names of their values."""

OTHERS = {
    **dict.fromkeys(
        (
            *("nprocs", "nproc", "np", "-n", "num_procs", "num_processes", "num_workers", "workers"),
            *("ngpus", "gpus", "num_devices", "devices", "ntasks", "ntasks_per_node", "gpus_per_node"),
            "nproc_per_gpu",
        ),
        _NUMBERS,
    ),
    **dict.fromkeys(("hosts", "machinefile", "host", "-f"), ("--hostfile", _NODES)),
    **dict.fromkeys(("num_machines", "nnode", "n_nodes"), ("--num_nodes", "--nnodes")),
    "machine_rank": ("--node_rank", "--node-rank"),
    "main_process_ip": ("--master_addr", "--master-addr"),
    "main_process_port": ("--master_port", "--master-port"),
    **dict.fromkeys(("-v", "verbose"), ("--log_level debug", "--log-level debug")),
    "-V": ("--version", "--version"),
    "-m": ("--module", "--module"),
    "restarts": ("--max-restarts", "--max-restarts"),
    "config_file": tuple([f"options such as {name}, in place of accelerate's file" for name in _NUMBERS]),
}
"""Options of other launchers, and what to use with ``dsl`` and with ``dslrun``."""

GONE = ("prewarm", "import_throttle")
"""Options that earlier versions had."""
_FOR_GONE = "which is gone, use --start-method forkserver or warm: all workers share one import"


def hint(flag: str, origin: Origin, known: Iterable[str]) -> str:
    """What the user most likely meant by an unknown option; empty if there is no good guess.

    ``origin``: the tool that the current command replaces. ``known``: the spellings of the command's options.
    """
    from difflib import get_close_matches

    from dsl.cli import options_deepspeed, options_torch

    lines = [options_deepspeed.COMMAND_LINE, options_torch.COMMAND_LINE]
    own, sister = lines if origin == DEEPSPEED else reversed(lines)
    options = list(known)
    spelled = {_word(name): name for name in reversed(options)}
    theirs = {
        _word(name): one.dest for one in sister.options for name in one.names if _word(name) not in spelled
    }
    word = _word(flag)
    if word in spelled:  # with one dash
        return f"did you mean {spelled[word]}?"
    if word in GONE:
        return _FOR_GONE
    if word in OTHERS:
        return f"did you mean {OTHERS[word][origin == TORCHRUN]}?"
    close = get_close_matches(flag, options, 1, 0.8)
    if word not in theirs and not close:
        word = next(iter(get_close_matches(word, theirs, 1, 0.8)), "")
    if word in theirs:
        text = INSTEAD[origin].get(theirs[word])
        return f"{own.program} has {text}" if text else f"only {sister.program} has it"
    near = close or get_close_matches(flag, options, 1)
    return f"did you mean {near[0]}?" if near else ""


def unknown_variables(environ: Iterable[str], line: CommandLine) -> list[Notice]:
    """A line for each of these variables that looks like the default of an option, and is none.

    Raises:
        OptionError: one is the default of an option that is gone.
    """
    from difflib import get_close_matches

    names = [name for option in line.options for name in option.names if name.startswith("--")]
    known = [line.prefix + _word(name).upper() for name in names]
    notices = []
    for variable in sorted(name for name in environ if name.startswith(line.prefix) and name not in known):
        word = variable.removeprefix(line.prefix).lower()
        if word in GONE:
            raise OptionError(f"{variable}: the default of --{dashed(word)}, {_FOR_GONE}")
        meant = line.prefix + _word(OTHERS.get(word, ("", ""))[1]).upper()
        near = [meant] if meant in known else get_close_matches(variable, known, 1, 0.8)
        text = f", did you mean {near[0]}?" if near else f": {line.program} has no option --{word}"
        notices.append(Notice("warning" if near else "info", f"{variable} has no effect{text}"))
    return notices


def _word(flag: str) -> str:
    """An option without its dashes; ``-n`` keeps its dash, because it is not the same as ``--n``."""
    return flag if len(flag) == 2 and flag[:1] == "-" else flag.lstrip("-").replace("-", "_")
