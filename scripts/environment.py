"""Set up everything the project needs on this machine, then become the given command.

    environment.py [--tests] [--lint] [--shells] [--release] [--torch] [--frameworks] [--cluster] [--docs]
                   [--site] [--] command...

Makes a virtual environment in ``.venv`` (or ``$DSL_VENV``), builds and installs the package, and adds what
the options name. Rust is found, or installed for this user, where something has to be built. What is already
there is reused: the second run takes a moment, and needs no network. Uses the standard library only.
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
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # started as a file, not with -m
    sys.path.insert(0, str(ROOT))

from scripts.machine import Need, call, fail, may_install, meet, output, say  # noqa: E402  as above

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

VENV = Path(os.environ.get("DSL_VENV", ROOT / ".venv")).absolute()
STAMP = VENV / "dsl-setup.json"
CODE = tuple(ROOT / name for name in ("Cargo.toml", "Cargo.lock", "python", "rust"))
SOURCES = (*CODE, *(ROOT / name for name in ("LICENSE", "README.md", "pyproject.toml")))
BUILT = (".so", ".pyc")
BASH_COMPLETION = "/usr/share/bash-completion/bash_completion"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")

TOOLS = {
    "tests": ("build", "test"),
    "lint": ("lint",),
    "release": ("release",),
    "docs": ("docs",),
    "frameworks": ("frameworks",),
}
"""Options, and what they install: groups of pyproject.toml."""
OPTIONS = {
    "tests": ("the test tools", 1.5),
    "lint": ("what judges the code", 0.5),
    "rust": ("Rust, and the package left as it is", 0.0),
    "shells": ("the shells and man, whose files are tested", 0.1),
    "release": ("what builds and judges a release", 0.5),
    "torch": ("torch", 5.0),
    "frameworks": ("torch and the training frameworks that are tested", 1.0),
    "cluster": ("what the hosts run in tests across nodes (as root)", 0.5),
    "docs": ("what builds the site", 0.3),
    "site": ("what builds the site, and a browser", 0.5),
}
"""Options, in words, and how many gigabytes they add."""
LEAST_GB = 2.0
"""Rust, and what a build leaves."""

Done = dict[str, Any]
"""What was installed, by name: the state of what decides about it."""


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Set-ups and builds of one checkout take turns."""
    with (ROOT / "pyproject.toml").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def needs(wanted: argparse.Namespace, *, is_new: bool) -> list[Need]:
    """What is missing on this machine itself. `is_new`: there is no virtual environment yet."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = []
    if is_new and importlib.util.find_spec("ensurepip") is None:
        found.append(Need("Python's venv module", (f"{version}-venv",)))
    if shutil.which("cc") is None:
        found.append(Need("a C compiler, with which Rust links", ("gcc", "libc6-dev")))
    if wanted.frameworks and shutil.which("c++") is None:
        found.append(Need("a C++ compiler, which DeepSpeed calls when a job starts", ("g++",)))
    if wanted.frameworks and not Path(sysconfig.get_path("include"), "Python.h").exists():
        found.append(Need("Python.h, for the same", (f"{version}-dev",)))
    if wanted.tests and shutil.which("kill") is None:
        found.append(Need("the program kill, by which tests send signals", ("procps",)))
    if wanted.shells:
        shells = [name for name in ("zsh", "fish", "tcsh", "mandoc", "less") if shutil.which(name) is None]
        shells += [] if os.path.exists(BASH_COMPLETION) else ["bash-completion"]
        found += [Need("tests of completion and man pages", tuple(shells), is_must=False)] if shells else []
    if wanted.cluster and may_install():
        programs = {"ip": "iproute2", "ssh-keygen": "openssh-client"}
        hosts = [package for program, package in programs.items() if shutil.which(program) is None]
        found += [Need("what connects the hosts of tests", tuple(hosts))] if hosts else []
    if wanted.site and not any(map(shutil.which, BROWSERS)):
        found.append(Need("tests in a browser", BROWSERS[:1], is_must=False))
    return found


def usable_home() -> None:
    """Tools keep their caches at home: give them another one if HOME cannot hold any."""
    home = os.environ.get("HOME", "")
    if not (os.path.isdir(home) and os.access(home, os.W_OK)):
        own = VENV / "home"
        own.mkdir(exist_ok=True)
        say(f"HOME={home} is no directory to write to, using {own}")
        os.environ["HOME"] = str(own)


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


def with_rust(python: str, env: dict[str, str], done: Done, *, is_needed: bool) -> dict[str, str]:
    """The environment with a Rust toolchain: of PATH, of the user's home, or our own; installed if needed."""
    for place in ({}, {"CARGO_HOME": str(Path.home() / ".cargo")}, done.get("rust", {})):
        path = [f"{place['CARGO_HOME']}/bin"] if place else []
        rust = {**env, **place, "PATH": os.pathsep.join([*path, env["PATH"]])}
        if rust_is_recent(rust):
            return rust
    if not is_needed:
        return env
    say("installing a Rust toolchain into this user's cache")
    call(python, "-m", "pip", "install", "--quiet", "puccinialin>=0.1.5")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rust.json"
        call(python, "-m", "puccinialin", "--info-json", str(answer), env=env, lines=1)
        made = json.loads(answer.read_text(encoding="utf-8"))["env"]
    rust = {**env, **made}
    if not rust_is_recent(rust):
        fail("no Rust toolchain could be installed: install a recent cargo and rustc, then try again")
    done["rust"] = {name: made[name] for name in ("CARGO_HOME", "RUSTUP_HOME")}
    return rust


def add_components(env: dict[str, str]) -> None:
    """What judges Rust code: our own toolchain, which is a minimal one, lacks it at first."""
    lacking = [name for name in ("fmt", "clippy") if not output("cargo", name, "--version", env=env)]
    if not lacking:
        return
    if shutil.which("rustup", path=env["PATH"]) is None:
        fail(f"cargo {' and '.join(lacking)} are missing: add rustfmt and clippy to your Rust toolchain")
    say("adding rustfmt and clippy to the Rust toolchain")
    call("rustup", "component", "add", "rustfmt", "clippy", env=env)


def digest(paths: Iterable[Path]) -> str:
    """Changes when a file below the paths changes, is added or removed."""
    result = hashlib.sha256()
    for path in paths:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file() and file.suffix not in BUILT:
                result.update(f"{file.relative_to(ROOT)}\0".encode())
                result.update(hashlib.sha256(file.read_bytes()).digest())
    return result.hexdigest()


def install_groups(python: str, wanted: set[str], done: Done) -> None:
    """The tools of options, unless the list has not changed since they were installed."""
    state = digest([ROOT / "pyproject.toml"])
    missing = sorted(name for name in wanted if done.get(name) != state)
    if not missing:
        return
    say(f"installing {', '.join(OPTIONS[name][0] for name in missing)}")
    groups = [word for name in missing for group in TOOLS[name] for word in ("--group", group)]
    # DeepSpeed compiles nothing beforehand, whatever the user's environment says.
    call(python, "-m", "pip", "install", "--quiet", *groups, env={**os.environ, "DS_BUILD_OPS": "0"})
    done.update(dict.fromkeys(missing, state))


def package_is_current(python: str, done: Done) -> bool:
    """True if the sources have not changed since the package was installed."""
    state = digest(SOURCES)
    return done.get("package") == state and bool(output(python, "-c", "import dsl; print('ok')"))


def build_wheel(python: str, env: dict[str, str], done: Done, folder: str) -> None:
    """Build the package."""
    # With the build tools at hand there is no need to fetch them into a throw-away environment.
    isolation = ["--no-build-isolation"] if "tests" in done else []
    call(
        python, "-m", "pip", "wheel", "--quiet", "--no-deps", *isolation, "--wheel-dir", folder, ".", env=env
    )


@contextlib.contextmanager
def installed_package(python: str, env: dict[str, str], done: Done) -> Iterator[None]:
    """Build the package beside what is done meanwhile, then install it."""
    state, code = digest(SOURCES), digest(CODE)
    say("building the package (the first time this takes a minute or two)")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
        built = pool.submit(build_wheel, python, env, done, folder)
        yield
        built.result()
        (wheel,) = Path(folder).glob("*.whl")
        requirements = digest([ROOT / "pyproject.toml"])
        if done.get("requirements") != requirements:
            call(python, "-m", "pip", "install", "--quiet", str(wheel))
        call(python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel))
    done.update(package=state, code=code, requirements=requirements)


def install_torch(python: str) -> None:
    """Install torch: without an NVIDIA driver the CPU-only build, where the package index offers one."""
    if output(python, "-c", "import importlib.util as u; print(u.find_spec('torch') or '')").strip():
        return
    extra = re.search(
        r"^torch = (\[.*?\])", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert extra is not None
    wanted: list[str] = json.loads(extra[1])
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
    """What the hosts of `tests/kit/cluster` run. Without root there are no hosts, and the tests say so."""
    if may_install():
        call(python, "-m", "tests.kit.cluster", env=env)
    else:
        say("tests across hosts will be skipped: they need root and apt-get")


def announce(wanted: argparse.Namespace) -> None:
    """Say what a first set-up takes."""
    size_gb = LEAST_GB + sum(gb for name, (_, gb) in OPTIONS.items() if getattr(wanted, name))
    where = f"{VENV}, target and ~/.cache"
    say(f"the first time takes 2 to 10 minutes, and up to {size_gb:.0f} GB of disk in {where}")


def prepare_machine(missing: list[Need], done: Done) -> None:
    """Packages of the system; what apt does not offer is not asked for again."""
    absent = {tuple(packages) for packages in done.get("not offered", [])}
    new = meet([need for need in missing if need.packages not in absent])
    done["not offered"] = sorted(absent | {need.packages for need in new})


def set_up(wanted: argparse.Namespace) -> dict[str, str]:
    """Set everything up and return the environment in which to run commands."""
    with turn():
        python = str(VENV / "bin" / "python")
        is_new = not output(python, "-m", "pip", "--version")
        done: Done = {} if is_new or not STAMP.exists() else json.loads(STAMP.read_text(encoding="utf-8"))
        if not done:
            announce(wanted)
        prepare_machine(needs(wanted, is_new=is_new), done)
        if is_new:
            say(f"creating {VENV}")
            call(sys.executable, "-m", "venv", "--clear", str(VENV))
        usable_home()
        env = {name: value for name, value in os.environ.items() if name not in {"PYTHONHOME", "PYTHONPATH"}}
        env.update(VIRTUAL_ENV=str(VENV), PATH=f"{VENV / 'bin'}{os.pathsep}{env.get('PATH', os.defpath)}")
        upgrade_pip(python)
        is_current = wanted.rust or package_is_current(python, done)
        is_built = wanted.tests or wanted.lint or wanted.rust or not is_current
        env = with_rust(python, env, done, is_needed=is_built)
        if wanted.lint:
            add_components(env)
        tools = {name for name in TOOLS if getattr(wanted, name)}
        install_groups(python, tools - {"frameworks"}, done)
        with contextlib.nullcontext() if is_current else installed_package(python, env, done):
            if wanted.torch or wanted.frameworks:
                install_torch(python)
            if wanted.frameworks:
                install_groups(python, {"frameworks"}, done)
            if wanted.cluster:
                prepare_cluster(python, env)
        STAMP.write_text(json.dumps(done), encoding="utf-8")
    return env


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="set up the project's environment, then run a command in it")
    for name, (text, _) in OPTIONS.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"with {text}")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    args.docs |= args.site
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    env = set_up(args)
    if command:
        try:
            os.execvpe(command[0], command, env)
        except OSError as error:
            fail(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
