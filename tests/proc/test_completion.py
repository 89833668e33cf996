"""Completion in the real shells: a line is typed, then Tab, and the shell says what has become of it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.terminal import terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    Complete = Callable[..., list[str]]
    """Types lines, each with Tab. Returns what the shell makes of them, without ends that ask for a value."""

# Ctrl-T shows the line. A shell reads its keys in order, so the answer is that to the last Tab.
BASH = """
PS1='ready> '
bind 'set show-all-if-ambiguous on' 'set bell-style none' 'set enable-bracketed-paste off'
bind -x '"\\C-t": echo "LINE<$READLINE_LINE>"'
{load}
"""
ZSH = """
PS1='ready> '
setopt no_beep no_prompt_sp no_prompt_cr
LISTMAX=100000
fpath=({site} $fpath)
autoload -Uz compinit && compinit -u -D
show() {{ zle -I; print "LINE<$BUFFER>" }}
zle -N show
bindkey '^T' show
{load}
"""
HOSTS = "worker-0 slots=2\nnode-1 slots=1\n"
HOSTILE = "$(touch${IFS}owned) slots=1\n`touch${IFS}owned` slots=1\n;touch slots=1\nnode-1 slots=1\n"


def shell_at(name: str) -> str:
    """The path of a shell, which the set-up installs."""
    path = shutil.which(name)
    if path is None and "CI" not in os.environ:
        pytest.skip(f"needs the program {name}")
    assert path is not None, f"{name} is missing, scripts/with-environment --shells installs it"
    return path


@pytest.fixture
def place(tmp_path: Path, dsl_command: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a few files, where the shells are."""
    for name, text in (("hosts", HOSTS), ("hostile", HOSTILE), ("train.py", ""), ("logged.txt", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{dsl_command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("XDG_DATA_DIRS", raising=False)
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):  # where jobs have their sockets, and others have theirs
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


def in_terminal(command: list[str], environ: dict[str, str]) -> Complete:
    def complete(*lines: str) -> list[str]:
        found = []
        with terminal(command, {"TERM": "xterm", **environ}, size=(200, 400)) as screen:
            screen.showed("ready> ")
            for line in lines:
                screen.press(f"{line}\t\x14".encode())
                screen.showed("LINE<")
                until(lambda: b">" in screen.shown())
                found.append(screen.shown().decode().partition(">")[0].rstrip(" ="))
                screen.showed("ready> ")  # it reads keys again
                screen.press(b"\x15")  # the next line is a new one
        return found

    return complete


def in_bash(place: Path, load: str) -> Complete:
    (place / "bashrc").write_text(BASH.format(load=load))
    return in_terminal([shell_at("bash"), "--noprofile", "--rcfile", str(place / "bashrc"), "-i"], {})


def in_zsh(place: Path, site: str, load: str = "") -> Complete:
    (place / ".zshrc").write_text(ZSH.format(site=site, load=load))
    return in_terminal([shell_at("zsh"), "-i"], {"ZDOTDIR": str(place)})


def in_fish(load: str) -> Complete:
    fish = shell_at("fish")
    script = f'{load}; for line in $argv; complete --do-complete "$line"; echo end; end'

    def complete(*lines: str) -> list[str]:
        result = ran([fish, "--no-config", "--command", script, *lines], check=True)
        found = []
        for line, answers in zip(lines, result.stdout.split("end\n"), strict=False):
            offered = [answer.partition("\t")[0] for answer in answers.splitlines()]
            same = os.path.commonprefix(offered)  # noqa: RUF071  the first letters are what is meant
            before, blank, last = line.rpartition(" ")
            found.append(f"{before}{blank}{same or last}".rstrip(" ="))
        return found

    return complete


@pytest.fixture(params=["bash", "zsh", "fish"])
def complete(request: pytest.FixtureRequest, place: Path) -> Complete:
    """Completion in one of the shells, loaded as the documentation says."""
    if request.param == "bash":
        return in_bash(place, 'eval "$(dsl --completion bash)"')
    if request.param == "zsh":
        return in_zsh(place, "", 'eval "$(dsl --completion zsh)"')
    return in_fish("dsl --completion fish | source")


LINES = {
    "an option": ("dsl --hostf", "dsl --hostfile"),
    "an option of another command": ("dslrun --nproc-p", "dslrun --nproc-per-node"),
    "an option of a tool": ("dsl-ps --js", "dsl-ps --json"),
    "a choice": ("dsl --start-method fo", "dsl --start-method fork"),
    "a choice in the same word": ("dsl --start-method=forks", "dsl --start-method=forkserver"),
    "a choice after another spelling": ("dsl --start_method sp", "dsl --start_method spawn"),
    "a word that may be a number": ("dslrun --nproc-per-node g", "dslrun --nproc-per-node gpu"),
    "a file": ("dsl --hostfile hosts", "dsl --hostfile hosts"),
    "a file in the same word": ("dsl --events=trai", "dsl --events=train.py"),
    "a directory": ("dsl --log-dir log", "dsl --log-dir logs/"),
    "no file for a number": ("dsl --num_gpus trai", "dsl --num_gpus trai"),
    "the script": ("dsl --num_gpus 2 trai", "dsl --num_gpus 2 train.py"),
    "the script after a flag": ("dsl --module --strict trai", "dsl --module --strict train.py"),
    "arguments of the script": ("dsl train.py --hostf", "dsl train.py --hostf"),
    "files of the script": ("dsl -q train.py --data logged.", "dsl -q train.py --data logged.txt"),
    "a host": ("dsl -H hosts -i nod", "dsl -H hosts -i node-1"),
    "a slot": ("dsl --hostfile hosts --include worker-0:0,", "dsl --hostfile hosts --include worker-0:0,1"),
    "a second host": ("dsl --hostfile=hosts -e worker-0:1@", "dsl --hostfile=hosts -e worker-0:1@node-1"),
    "a host in the same word": ("dsl -H hosts --include=wor", "dsl -H hosts --include=worker-0"),
    "a device": ("dsl --include localhost:", "dsl --include localhost:0"),
    "a signal of a list": ("dslrun --signals-to-handle HUP,SIGXC", "dslrun --signals-to-handle HUP,SIGXCPU"),
    "a word that a tool takes": ("dsl-warm sto", "dsl-warm stop"),
    "a shell of the completion": ("dsl --completion z", "dsl --completion zsh"),
}


def test_a_shell_completes(complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_SIZE", "1")
    found = complete(*[line for line, _ in LINES.values()])
    assert dict(zip(LINES, found, strict=True)) == {case: expected for case, (_, expected) in LINES.items()}


def test_tcsh_completes(place: Path) -> None:
    """It is loaded from a file: ``eval`` would join the lines."""
    lines = {
        "dslrun --nproc-p": "dslrun --nproc-per-node",
        "dslrun --start-method forks": "dslrun --start-method forkserver",
        "dsl --start_method=forks": "dsl --start_method=forkserver",
        "dsl --hostfile hosts": "dsl --hostfile hosts",
        "dsl -i node": "dsl -i node-1",
        "dsl --num_gpus 2 trai": "dsl --num_gpus 2 train.py",
        "dsl-warm sto": "dsl-warm stop",
    }
    (place / "short").write_text("node-1 slots=1\n")
    environ = {"TERM": "xterm", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-1", "HOME": str(place)}
    with terminal([shell_at("tcsh"), "-f"], environ, size=(200, 400)) as screen:
        screen.press(b"set prompt='rea''dy> '; dslrun --print-completion tcsh > script; source script\n")
        for line, expected in lines.items():
            screen.showed("ready> ")
            screen.press(f"{line}\t".encode())
            screen.showed(expected)
            screen.press(b"\x15\n")


def test_the_other_spelling_of_an_option_is_completed(complete: Complete) -> None:
    """Zsh turns it into that of the help."""
    assert complete("dsl --num-g")[0] in ("dsl --num-gpus", "dsl --num_gpus")


@pytest.mark.usefixtures("place")
def test_fish_describes_each_choice_and_each_option() -> None:
    """A choice without a text of its own would get that of its option."""
    lines = ("dslrun --start-method ", "dslrun --start-method=f", "dslrun --nproc-per-node ", "dsl-warm ")
    script = f"dsl --completion fish | source; for line in {shlex.join([*lines, 'dslrun --'])}"
    words = [shell_at("fish"), "--no-config"]
    words += ["--command", f'{script}; complete --do-complete "$line"; echo; end']
    result = ran(words, check=True)
    assert result.stderr == ""
    found = [block.splitlines() for block in result.stdout.split("\n\n")]
    texts = dict(one.partition("\t")[::2] for one in found[0])
    assert set(texts) == {"spawn", "fork", "forkserver", "warm", "auto"}
    assert texts["forkserver"] == "import once, then fork the workers"
    assert (texts["auto"], texts["spawn"]) == ("where that pays", "")
    assert found[1] == ["--start-method=fork", f"--start-method=forkserver\t{texts['forkserver']}"]
    assert found[2:4] == [["auto", "cpu", "gpu"], ["start", "status", "stop"]]
    assert "--start-method\thow workers get their imports" in found[4]
    assert all(re.fullmatch(r"--[a-z-]+\t.+", one) for one in found[4])


def test_a_job_is_completed_by_its_pid(complete: Complete, dsl_command: Path) -> None:
    """Also one that has ended: `dsl-wait` has its exit code."""
    said = ran([str(dsl_command), "--detach", "--num_gpus=1", "--no_python", "true"], check=True)
    (pid,) = set(re.findall(r"\bjob (\d+)", said.stdout + said.stderr))
    subprocess.run([dsl_command.with_name("dsl-wait"), pid], check=True, timeout=20)
    short = pid[:-1]
    assert complete(f"dsl-wait {short}", f"dsl-stacks {short}") == [f"dsl-wait {pid}", f"dsl-stacks {short}"]


def test_what_a_hostfile_says_is_no_command(complete: Complete, place: Path) -> None:
    assert complete("dsl -H hostile -i ") == ["dsl -H hostile -i node-1"]
    assert not (place / "owned").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_find_what_the_package_installs(place: Path, dsl_command: Path, shell: str) -> None:
    """Nothing is loaded by hand; a tool is the first command that is completed."""
    share = dsl_command.parent.parent / "share"
    if shell == "bash":
        loader = Path("/usr/share/bash-completion/bash_completion")
        if not loader.exists() and "CI" not in os.environ:
            pytest.skip("needs the program bash-completion")
        complete = in_bash(place, f"export XDG_DATA_DIRS={share}; . {loader}")
    elif shell == "zsh":
        complete = in_zsh(place, str(share / "zsh" / "site-functions"))
    else:
        complete = in_fish(f"set -p fish_complete_path {share}/fish/vendor_completions.d")
    found = complete("dsl-ps --js", "dslrun --use-e", "dsl --hostf")
    assert found == ["dsl-ps --json", "dslrun --use-env", "dsl --hostfile"]
