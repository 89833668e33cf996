"""Set up everything the project needs on this machine, then become the given command.

    environment.py [--tests] [--release] [--torch] [--frameworks] [--cluster] [--docs] [--site]
                   [--] command...

Makes a virtual environment in ``.venv`` (or ``$DSL_VENV``), finds or installs a Rust toolchain and a linker,
builds and installs the package; ``--torch`` adds torch, ``--tests`` the tools of the tests, ``--release``
those of a release, ``--frameworks`` torch and the training frameworks that are tested with the package,
``--cluster`` the programs of the hosts that tests across several nodes start (a cache of the user; nothing of
it is installed), ``--docs`` what builds the site, ``--site`` also the browser that reads it in tests. What
is already there is reused: the second run takes a moment. Uses the standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("DSL_VENV", ROOT / ".venv")).absolute()
STAMP = VENV / "dsl-setup.json"
SOURCES = ("Cargo.toml", "Cargo.lock", "LICENSE", "README.md", "pyproject.toml", "python", "rust")
BUILT = (".so", ".pyc")
BASH_COMPLETION = "/usr/share/bash-completion/bash_completion"


def say(text: str) -> None:
    """One line of progress."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """End with one line that says what to do."""
    sys.exit(f"set-up: {text}")


def call(*command: str, env: dict[str, str] | None = None) -> None:
    """Run a command; its failure ends the set-up. It prints to stderr: stdout is the wrapped command's."""
    result = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=2, check=False)
    if result.returncode != 0:
        fail(f"`{' '.join(command)}` failed with exit code {result.returncode}")


def output(*command: str, env: dict[str, str] | None = None) -> str:
    """What a command prints; empty when it fails or does not exist."""
    try:
        result = subprocess.run(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return result.stdout if result.returncode == 0 else ""


def install_debian_packages(*names: str, needed_for: str) -> None:
    """Install Debian packages as root; otherwise say which ones to install."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        fail(f"{needed_for} is missing: first run `sudo apt-get install {' '.join(names)}`")
    say(f"installing {' '.join(names)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    call("apt-get", "update", "-qq", env=env)
    call("apt-get", "install", "-y", "-qq", "--no-install-recommends", *names, env=env)


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Set-ups and builds of one checkout take turns."""
    with (ROOT / "pyproject.toml").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def venv_python() -> str:
    """The virtual environment's interpreter; the environment is made when it is missing or broken."""
    python = str(VENV / "bin" / "python")
    if output(python, "-m", "pip", "--version"):
        return python
    if importlib.util.find_spec("ensurepip") is None:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        install_debian_packages(f"{version}-venv", needed_for="python's venv module")
    say(f"creating {VENV}")
    call(sys.executable, "-m", "venv", "--clear", str(VENV))
    return python


def usable_home() -> None:
    """Tools keep their caches at home: give them another one if HOME cannot hold any."""
    home = os.environ.get("HOME", "")
    if not (os.path.isdir(home) and os.access(home, os.W_OK)):
        own = VENV / "home"
        own.mkdir(exist_ok=True)
        say(f"HOME={home} is no directory to write to, using {own}")
        os.environ["HOME"] = str(own)


def install_shells() -> None:
    """The shells whose completion is tested, and what judges man pages. Tests that lack them say so."""
    missing = [name for name in ("zsh", "fish", "mandoc") if shutil.which(name) is None]
    if not os.path.exists(BASH_COMPLETION):
        missing.append("bash-completion")
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        say(f"tests of completion and man pages will be skipped: they need {', '.join(missing)}")
        return
    install_debian_packages(*missing, needed_for="completion and man pages")


def upgrade_pip(python: str) -> None:
    """Dependency groups need pip 25.1."""
    version = re.match(r"pip (\d+)\.(\d+)", output(python, "-m", "pip", "--version"))
    if version is None or (int(version[1]), int(version[2])) < (25, 1):
        call(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25.1")


def rust_is_recent(env: dict[str, str]) -> bool:
    """True if the cargo on this PATH builds the workspace."""
    wanted = re.search(
        r'^rust-version = "(\d+)\.(\d+)',
        (ROOT / "Cargo.toml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    found = re.match(r"cargo (\d+)\.(\d+)", output("cargo", "--version", env=env))
    if wanted is None or found is None:
        return False
    return (int(found[1]), int(found[2])) >= (int(wanted[1]), int(wanted[2]))


def with_rust(python: str, env: dict[str, str]) -> dict[str, str]:
    """The environment with a Rust toolchain and a linker, which are installed when they are missing."""
    if shutil.which("cc") is None:
        install_debian_packages("gcc", "libc6-dev", needed_for="a C compiler (Rust links with it)")
    if rust_is_recent(env):
        return env
    home = {**env, "PATH": f"{Path.home() / '.cargo' / 'bin'}{os.pathsep}{env['PATH']}"}
    if rust_is_recent(home):
        return home
    say("installing a Rust toolchain for this user's cache")
    call(python, "-m", "pip", "install", "--quiet", "puccinialin>=0.1.5")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rust.json"
        call(python, "-m", "puccinialin", "--info-json", str(answer), env=env)
        rust = {**env, **json.loads(answer.read_text(encoding="utf-8"))["env"]}
    if not rust_is_recent(rust):
        fail("no Rust toolchain could be installed: install a recent cargo and rustc, then try again")
    return rust


def digest(paths: list[Path]) -> str:
    """Changes when a file below the paths changes, is added or removed."""
    result = hashlib.sha256()
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.suffix not in BUILT:
                result.update(f"{file.relative_to(ROOT)}\0".encode())
                result.update(hashlib.sha256(file.read_bytes()).digest())
    return result.hexdigest()


def install_groups(python: str, done: dict[str, str]) -> None:
    """The tools of the tests, unless the list has not changed since they were installed."""
    state = digest([ROOT / "pyproject.toml"])
    if done.get("groups") == state:
        return
    say("installing the test tools")
    groups = [word for name in ("build", "test", "lint") for word in ("--group", name)]
    call(python, "-m", "pip", "install", "--quiet", *groups)
    done["groups"] = state


def install_tools(python: str, group: str, what: str, done: dict[str, str]) -> None:
    """The tools of a group, unless the list has not changed since they were installed."""
    state = digest([ROOT / "pyproject.toml"])
    if done.get(group) == state:
        return
    say(f"installing {what}")
    call(python, "-m", "pip", "install", "--quiet", "--group", group)
    done[group] = state


def install_frameworks(python: str, env: dict[str, str], done: dict[str, str]) -> None:
    """The training frameworks, and what DeepSpeed needs to compile an operation of a job on the CPU."""
    headers = output(python, "-c", "import sysconfig; print(sysconfig.get_path('include'))").strip()
    purpose = "(DeepSpeed compiles when a job starts)"
    if shutil.which("c++") is None:
        install_debian_packages("g++", needed_for=f"a C++ compiler {purpose}")
    if not (Path(headers) / "Python.h").exists():
        install_debian_packages(f"{Path(headers).name}-dev", needed_for=f"Python.h {purpose}")
    state = digest([ROOT / "pyproject.toml"])
    if done.get("frameworks") == state:
        return
    say("installing the training frameworks")
    # Nothing is compiled beforehand, whatever the user's environment says.
    env = {**env, "DS_BUILD_OPS": "0"}
    call(python, "-m", "pip", "install", "--quiet", "--group", "frameworks", env=env)
    done["frameworks"] = state


def install_package(python: str, env: dict[str, str], done: dict[str, str]) -> None:
    """Build and install the package, unless its sources have not changed since the last time."""
    state = digest([ROOT / name for name in SOURCES])
    if done.get("package") == state and output(python, "-c", "import dsl; print('ok')"):
        return
    say("building and installing the package (the first time this takes a minute or two)")
    # With the build tools at hand there is no need to fetch them into a throw-away environment.
    isolation = ["--no-build-isolation"] if "groups" in done else []
    call(python, "-m", "pip", "install", "--quiet", *isolation, ".", env=env)
    done["package"] = state


def install_torch(python: str) -> None:
    """Install torch: without an NVIDIA driver the CPU-only build, where the package index offers one."""
    if output(
        python, "-c", "import importlib.util as u; print('ok' if u.find_spec('torch') else '')"
    ).strip():
        return
    listing = "import importlib.metadata as m; print('\\n'.join(m.requires('dsl')))"
    extra = re.compile(r"(.+?) *; *extra == ['\"]torch['\"]")
    wanted = [
        found[1] for line in output(python, "-c", listing).splitlines() if (found := extra.fullmatch(line))
    ]
    if not Path("/proc/driver/nvidia/version").exists():
        offered = re.search(
            r"[ ,](\d[\w.]*\+cpu)\b", output(python, "-m", "pip", "index", "versions", "torch")
        )
        if offered:
            wanted = [f"torch=={offered[1]}" if re.match(r"torch\b", item) else item for item in wanted]
        else:
            say("no CPU-only torch on the package index (PIP_EXTRA_INDEX_URL may name one that has it)")
    say(f"installing {' '.join(wanted)} (this can be several gigabytes)")
    call(python, "-m", "pip", "install", "--quiet", *wanted)


def prepare_cluster(python: str, env: dict[str, str]) -> None:
    """What the hosts of `kit/cluster` run. Without root there are no hosts, and the tests say so."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        needed = "root" if os.geteuid() != 0 else "apt-get"
        say(f"tests across hosts will be skipped: they need {needed}")
        return
    call(python, "-m", "kit.cluster", env=env)


def prepare_browser() -> None:
    """Chromium, where it can be installed. Without it the tests in a browser say so."""
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    if any(map(shutil.which, names)):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        say("tests in a browser will be skipped: they need Chromium (`sudo apt-get install chromium`)")
        return
    call("apt-get", "update", "-qq")
    # Ubuntu's package is only a reference to a snap.
    if output("apt-cache", "show", names[0]):
        install_debian_packages(names[0], needed_for="a browser")
    else:
        say(f"tests in a browser will be skipped: apt-get has no {names[0]} here")


def set_up(wanted: argparse.Namespace) -> dict[str, str]:
    """Set everything up and return the environment in which to run commands."""
    with turn():
        python = venv_python()
        usable_home()
        env = {name: value for name, value in os.environ.items() if name not in {"PYTHONHOME", "PYTHONPATH"}}
        env.update(VIRTUAL_ENV=str(VENV), PATH=f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}")
        upgrade_pip(python)
        env = with_rust(python, env)
        done: dict[str, str] = json.loads(STAMP.read_text(encoding="utf-8")) if STAMP.exists() else {}
        if wanted.tests:
            install_groups(python, done)
            install_shells()
        if wanted.release:
            install_tools(python, "release", "the release tools (zig among them, 100 MB)", done)
        if wanted.docs or wanted.site:
            install_tools(python, "docs", "what builds and tests the site (60 MB)", done)
        install_package(python, env, done)
        if wanted.torch or wanted.frameworks:
            install_torch(python)
        if wanted.frameworks:
            install_frameworks(python, env, done)
        if wanted.site:
            prepare_browser()
        if wanted.cluster:
            prepare_cluster(python, env)
        STAMP.write_text(json.dumps(done), encoding="utf-8")
    return env


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="set up the project's environment, then run a command in it")
    parser.add_argument("--tests", action="store_true", help="with the test and lint tools")
    parser.add_argument("--release", action="store_true", help="with what builds and judges a release")
    parser.add_argument("--torch", action="store_true", help="with torch")
    parser.add_argument(
        "--frameworks", action="store_true", help="with torch and the training frameworks that are tested"
    )
    parser.add_argument(
        "--cluster", action="store_true", help="with what the hosts run in tests across nodes (as root)"
    )
    parser.add_argument("--docs", action="store_true", help="with what builds the site")
    parser.add_argument("--site", action="store_true", help="with what builds the site, and a browser")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    env = set_up(args)
    if command:
        try:
            os.execvpe(command[0], command, env)
        except OSError as error:
            fail(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
