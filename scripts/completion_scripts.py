"""The completion scripts of bash, zsh, fish and tcsh, made from the parsers of all commands.

Options, choices, files and directories stand in the script. It asks ``dsl --completion`` for hosts and jobs,
which change, and for signals, which stand in lists.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dsl.cli import options_deepspeed, options_torch
from dsl.cli.completion import ASKED
from dsl.cli.elastic import ELASTIC
from dsl.cli.parser import Parser, Repeated
from dsl.cli.ssh import SSH
from dsl.cli.tool import without_sisters
from dsl.model.options import dashed
from dsl.view.report import REPORT
from dsl.view.tools import ATTACH, PS, STACKS, TOP, WAIT
from dsl.view.warm import WARM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.cli.tool import ToolParser

FILES = ("PATH", "FILE", "CONFIG", "SCRIPT")
"""Values that are files, by the word for them in the help."""
ENDS_OPTIONS = ("SCRIPT", "COMMAND")
"""What follows these is not for us."""

HEAD = "# Completion of {commands} in {shell}, made from their options: do not edit.\n"

BASH = r"""
_dsl_value() { # COMMAND OPTION: whether the next word is its value, and what that is
    case "$1 $2" in
@VALUES@
        *) return 1 ;;
    esac
}

_dsl_offer() { # WORD...: those that begin with what is typed
    local word
    for word in "$@"; do
        if [[ $word == "$current"* ]]; then COMPREPLY+=("${word#"$kept"}"); fi
    done
}

_dsl() {
    local rest=$COMP_LINE words=() at value hostfile= kept= tail mark line
    for ((at = 0; at <= COMP_CWORD; at++)); do # readline also splits words at some characters
        if ((at == 0)) || [[ $rest == [[:space:]]* ]]; then
            words+=("${COMP_WORDS[at]}")
        else
            words[-1]+=${COMP_WORDS[at]}
        fi
        rest=${rest#"${rest%%[![:space:]]*}"}
        rest=${rest#"${COMP_WORDS[at]}"}
    done
    local command=${words[0]##*/} current=${words[-1]} last=$((${#words[@]} - 1)) names operand others ends
    case $command in
@COMMANDS@
    esac
    COMPREPLY=()
    for ((at = 1; at < last; at++)); do
        value=
        case ${words[at]} in
            --) at=$last ;;
            -H | -f | --hostfile) hostfile=${words[at + 1]} ;;&
            --hostfile=*) hostfile=${words[at]#*=} ;;&
            -?*) if [[ ${words[at]} != --*=* ]] && _dsl_value "$command" "${words[at]}"; then ((at++)); fi ;;
            *) if [[ $ends ]]; then at=$last; fi ;;
        esac
    done
    if ((at <= last)); then value=$operand; fi # no option waits for its value
    if [[ $ends && at -eq $((last + 1)) && ! $value ]]; then
        compopt -o default # the words behind the script
        return
    fi
    if [[ $current == --*=* ]] && ((at <= last)); then
        _dsl_value "$command" "${current%%=*}" || return 0
        current=${current#*=}
    elif ((at <= last)) && [[ $current == -* || ! $value ]]; then
        _dsl_offer $names
        if ! ((${#COMPREPLY[@]})); then _dsl_offer $others; fi
        return
    fi
    tail=$current
    for mark in = :; do # readline replaces what follows the last of these
        if [[ $COMP_WORDBREAKS == *$mark* ]]; then tail=${tail##*"$mark"}; fi
    done
    if [[ $COMP_WORDBREAKS == *@* && $tail == *@* ]]; then tail=@${tail##*@}; fi # and this one itself
    kept=${current%"$tail"}
    case $value in
        PATH) compopt -o default ;;
        DIR) compopt -o dirnames ;;
        COMMAND) mapfile -t COMPREPLY < <(compgen -c -- "$current") ;;
        @ASKED@)
            compopt -o nospace
            while IFS=$'\t' read -r line _; do
                _dsl_offer "$line"
            done < <(command dsl --completion "$value" "$command" "$current" "$hostfile" 2>/dev/null)
            ;;
        *) _dsl_offer ${value#-} ;;
    esac
}
complete -F _dsl @NAMES@
"""

ZSH = r"""
_dsl_ask() { # KIND
    local line hostfile=${opt_args[--hostfile]:-${opt_args[-H]:-$opt_args[-f]}}
    local -a found texts
    for line in ${(f)"$(_call_program answers "command dsl --completion \
            ${(q)1} ${(q)service} ${(q)PREFIX} ${(q)hostfile}")"}; do
        found+=("${line%%$'\t'*}")
        texts+=("${line%%$'\t'*}  -- ${line#*$'\t'}")
    done
    if [[ $1 == JOB ]]; then
        compadd -l -d texts -a found
    else
        compadd -S '' -d texts -a found
    fi
}

_dsl() {
    local curcontext=$curcontext state line
    typeset -A opt_args
    case $service in
@COMMANDS@
    esac
}

if [[ $funcstack[1] == _dsl ]]; then
    _dsl "$@"
else
    compdef _dsl @NAMES@
fi
"""

FISH = r"""
function __dsl_takes # COMMAND OPTION: whether the next word is its value
    switch "$argv"
@VALUES@
            return 0
    end
    return 1
end

function __dsl_before # whether options are for the command: its script has not been typed
    set -l words (commandline -opc)
    set -l command (string replace -r '.*/' '' -- $words[1])
    set -l is_value 0
    for word in $words[2..-1]
        if test $is_value = 1
            set is_value 0
            continue
        end
        switch $word
            case '--'
                return 1
            case '--*=*'
            case '-*'
                __dsl_takes $command $word; and set is_value 1
            case '*'
                return 1
        end
    end
    return 0
end

function __dsl_spelled # OPTION OTHER: whether an option is spelled like this, and not as the help has it
    set -l word (string replace -r '=.*' '' -- (commandline -ct))
    set -l words (commandline -opc)
    test "$words[-1]" = "$argv[1]"; and return 0
    string match -q -- "$word*" $argv[1]; and not string match -q -- "$word*" $argv[2]
end

function __dsl_ask # KIND
    set -l words (commandline -opc)
    set -l hostfile ''
    for at in (seq 2 (count $words))
        switch $words[$at]
            case -H -f --hostfile
                set -l next (math $at + 1)
                set hostfile "$words[$next]"
            case '--hostfile=*'
                set hostfile (string replace -r '^[^=]*=' '' -- $words[$at])
        end
    end
    set -l word (string replace -r '^--[^=]*=' '' -- (commandline -ct))
    set -l command (string replace -r '.*/' '' -- $words[1])
    command dsl --completion $argv[1] $command "$word" "$hostfile" 2>/dev/null
end

@COMMANDS@
"""


def parsers() -> list[ToolParser]:
    """The parsers of all commands."""
    lines = [options_deepspeed.COMMAND_LINE, options_torch.COMMAND_LINE]
    tools = (PS, TOP, STACKS, ATTACH, WAIT, WARM, REPORT, SSH, ELASTIC)
    return [*map(Parser, lines), *[tool.make_parser() for tool in tools]]


def option_groups(parser: ToolParser) -> dict[str, list[argparse.Action]]:
    """The options that the help shows, by the titles of their groups."""
    found = {}
    for group in parser._action_groups:  # noqa: SLF001  it has no other
        options = [one for one in group._group_actions if one.option_strings]  # noqa: SLF001  as above
        found[str(group.title)] = [one for one in options if one.help != argparse.SUPPRESS]
    return {title: options for title, options in found.items() if options}


def bash(parsers: Sequence[ToolParser]) -> str:
    """The script for bash."""
    values, commands = [], []
    for parser in parsers:
        for option in filter(_takes_value, _options_of(parser)):
            cases = " | ".join(f"'{parser.prog} {name}'" for name in option.option_strings)
            values.append(f"        {cases}) value={_quoted(_value(option))} ;;")
        names, others = _spellings(parser)
        operand = _operand(parser)
        commands += [
            f"        {parser.prog})",
            f"            operand={_quoted(_kind(operand))} ends={'1' if operand in ENDS_OPTIONS else ''}",
            f"            names={_quoted(' '.join(names))}",
            f"            others={_quoted(' '.join(others))}",
            "            ;;",
        ]
    asked = " | ".join(map(_quoted, ASKED))
    return _filled(BASH, "bash", parsers, VALUES=values, COMMANDS=commands).replace("@ASKED@", asked)


def zsh(parsers: Sequence[ToolParser]) -> str:
    """The script for zsh."""
    actions = {"PATH": "_files", "DIR": "_files -/", "COMMAND": "_command_names -e", "-": " "}
    commands = []
    for parser in parsers:
        specs = ["-s -S -A '-*' -M 'm:_=- m:-=_ r:|[_-]=* r:|=*'"]
        for option in _options_of(parser):
            shown = without_sisters(option.option_strings)
            group = "*" if isinstance(option, Repeated) else f"({' '.join(option.option_strings)})"
            value = _value(option)
            action = actions.get(value) or _zsh_action(value)
            text = f"[{_escaped(_text(option), '[]:')}]"
            for name in option.option_strings:
                hidden = "" if name in shown else "!"
                spec = f"{hidden}{group}{name}"
                if option.nargs == "?":
                    spec += f"=-{text}::{option.metavar}: "
                elif _takes_value(option):
                    mark = "=" if name.startswith("--") else "+"
                    spec += f"{mark}{text}:{_escaped(str(option.metavar or 'WORD'), ':')}:{action}"
                else:
                    spec += text
                specs.append(_quoted(spec))
        operand = _operand(parser)
        action = actions.get(_kind(operand)) or _zsh_action(_kind(operand))
        if operand in ENDS_OPTIONS:
            rest = "_normal" if operand == "COMMAND" else "_files"
            specs += [_quoted(f"(-)1:{operand}:{action}"), f"'*::ARGUMENTS:{rest}'"]
        elif operand:
            specs.append(_quoted(f"{'*' if operand in ASKED else '1'}:{operand}:{action}"))
        lines = " \\\n                ".join(specs)
        commands += [f"        {parser.prog})", f"            _arguments {lines}", "            ;;"]
    names = " ".join(parser.prog for parser in parsers)
    return f"#compdef {names}\n" + _filled(ZSH, "zsh", parsers, COMMANDS=commands)


def fish(parsers: Sequence[ToolParser]) -> str:
    """The script for fish."""
    values, commands = [], []
    for parser in parsers:
        operand = _operand(parser)
        before = operand in ENDS_OPTIONS
        for option in _options_of(parser):
            names = [f"'{parser.prog} {name}'" for name in option.option_strings]
            values += names if _takes_value(option) else []
            shown = without_sisters(option.option_strings)
            value = f" {_fish_value(_value(option), _choice_texts(option))}" if _takes_value(option) else ""
            for name in option.option_strings:
                other = next((one for one in shown if dashed(one) == dashed(name)), name)
                conditions = ["__dsl_before"] * before + [f"__dsl_spelled {name} {other}"] * (name != other)
                where = f" -n {_quoted('; and '.join(conditions), fish=True)}" if conditions else ""
                spelled = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                text = _quoted(_text(option), fish=True)
                commands.append(f"complete -c {parser.prog}{where} {spelled}{value} -d {text}")
        if operand == "COMMAND":
            commands.append(
                f"complete -c {parser.prog} -n __dsl_before -f -a '(complete -C (commandline -ct))'"
            )
        elif operand not in FILES:
            offered = f" {_fish_value(_kind(operand), {})}" if operand else " -f"
            commands.append(f"complete -c {parser.prog}{offered}")
    cases = [f"        case {' '.join(values)}"]
    return _filled(FISH, "fish", parsers, VALUES=cases, COMMANDS=commands)


def tcsh(parsers: Sequence[ToolParser]) -> str:
    """The script for tcsh, which cannot tell our options from those behind the script."""
    commands = []
    for parser in parsers:
        kinds = {"PATH": "f", "DIR": "d", "COMMAND": "c", "-": "n", "": "n"}
        ask = "`dsl --completion {} " + parser.prog + " '' '' | cut -f1`"
        kinds |= {kind: ask.format(kind) for kind in ASKED}
        rules = []
        for option in filter(_takes_value, _options_of(parser)):
            offered = kinds.get(_value(option)) or f"({_value(option)})"
            for name in option.option_strings:
                rules += [f"n@{name}@{offered}@", *([f"c@{name}=@{offered}@"] if name[1] == "-" else [])]
        names = [name[2:] for name in _spellings(parser)[0] if name.startswith("--")]
        kind = _kind(_operand(parser))
        rules += [f"c@--@({' '.join(names)})@", f"p@*@{kinds.get(kind) or f'({kind})'}@"]
        commands.append(" ".join(["complete", parser.prog, *map(_quoted, rules)]))
    return _filled("\n@COMMANDS@\n", "tcsh", parsers, COMMANDS=commands)


WRITERS = {"bash": bash, "zsh": zsh, "fish": fish, "tcsh": tcsh}


def _options_of(parser: ToolParser) -> list[argparse.Action]:
    """The options that help shows."""
    return [one for group in option_groups(parser).values() for one in group]


def _operand(parser: ToolParser) -> str:
    """What the help calls the first word that is no option; empty: there is no such word."""
    return next((str(one.metavar) for one in parser._actions if not one.option_strings), "")  # noqa: SLF001  as above


def _takes_value(option: argparse.Action) -> bool:
    """Whether the value may be the next word."""
    return option.nargs is None


def _zsh_action(value: str) -> str:
    return f" _dsl_ask {value}" if value in ASKED else f"({value})"


def _fish_value(value: str, texts: Mapping[str, str]) -> str:
    if value in ASKED:
        return f"-x -a '(__dsl_ask {value})'"
    known = {"PATH": "-rF", "DIR": "-x -a '(__fish_complete_directories)'", "-": "-x"}
    # A word without a text of its own, even an empty one, would get that of the option.
    words = [rf"{word}\t{_quoted(texts.get(word, ''), fish=True)}" for word in value.split()]
    return known.get(value) or f"-x -a {_quoted(' '.join(words), fish=True)}"


def _value(option: argparse.Action) -> str:
    """What an option's value is: words to choose from, PATH, DIR, one of `ASKED`, or - for anything else."""
    return " ".join(option.choices or ()) or _kind(str(option.metavar or ""))


def _kind(word: str) -> str:
    """The same for a word of the help, such as ``N|auto``."""
    if word in ("", "DIR", "COMMAND", *ASKED):
        return word
    words = [one for one in word.split("|") if one == one.lower()]
    return "PATH" if word in FILES else " ".join(words) or "-"


def _spellings(parser: ToolParser) -> tuple[list[str], list[str]]:
    """The options as the help spells them, and the other spellings."""
    names = [name for option in _options_of(parser) for name in without_sisters(option.option_strings)]
    all_names = [name for option in _options_of(parser) for name in option.option_strings]
    return names, [name for name in all_names if name not in names]


def _text(option: argparse.Action) -> str:
    """What the option is for, up to the first semicolon."""
    return (option.help or "").partition(";")[0].partition(" (default")[0]


def _choice_texts(option: argparse.Action) -> dict[str, str]:
    """What the help says about single choices: ``...; auto: where that pays``."""
    pairs = [one.strip().partition(": ") for one in (option.help or "").partition(" (default")[0].split(";")]
    return {word: text for word, _, text in pairs}


def _filled(template: str, shell: str, parsers: Sequence[ToolParser], **blocks: Sequence[str]) -> str:
    names = " ".join(parser.prog for parser in parsers)
    for name, lines in blocks.items():
        template = template.replace(f"@{name}@", "\n".join(lines))
    return HEAD.format(commands=names, shell=shell) + template.replace("@NAMES@", names)


def _escaped(text: str, marks: str) -> str:
    return "".join(f"\\{char}" if char in marks or char == "\\" else char for char in text)


def _quoted(text: str, *, fish: bool = False) -> str:
    """Text as one word of a shell."""
    return "'" + (_escaped(text, "'") if fish else text.replace("'", "'\\''")) + "'"
