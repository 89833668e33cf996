"""Run tests on other Pythons than the environment's own: the oldest that is promised and the newest here.

    pythons.py

Looks for them in ``PYTHONS`` (paths, separated as in PATH), on PATH and among pyenv's versions; as root,
where one is missing and apt offers it, installs it. Each has an environment of its own under
``.venv/pythons``, with one and the same wheel. A Python that cannot be had counts as skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # started as a file, not with -m
    sys.path.insert(0, str(ROOT))

from scripts.environment import SOURCES, VENV, digest, turn  # noqa: E402  as above
from scripts.machine import Need, call, may_install, meet, output, say  # noqa: E402  as above

FOLDER = VENV / "pythons"
OWN = (sys.version_info.major, sys.version_info.minor)
NEWEST_KNOWN = 15
ASK = "import sys, sysconfig, venv; print(*sys.version_info[:2], sysconfig.get_platform(), sys.version)"
# What depends on the interpreter. Left out: what takes long and computes alone (topologies), the package and
# the stub, which are the same for all, and whatever needs torch.
TESTS = (
    "tests/unit",
    "tests/contract",
    "tests/test_imports.py",
    "tests/test_exports.py",
    "tests/proc/test_fork_conformance.py",
    "tests/proc/test_fork_endings.py",
    "tests/proc/test_fork_imports.py",
    "--ignore=tests/contract/test_hwloc.py",
    "--ignore=tests/contract/test_torch_numa.py",
)
MARKS = "not faults and not torch and not cluster and not frameworks and not stress"

Version = tuple[int, int]


class Python(NamedTuple):
    """An interpreter that tests can run on."""

    version: Version
    path: str
    state: str
    """Changes when the interpreter is another one."""

    @property
    def folder(self) -> Path:
        """Where its environment is."""
        return FOLDER / name(self.version)

    @property
    def program(self) -> str:
        """The environment's interpreter."""
        return str(self.folder / "bin" / "python")


def name(version: Version) -> str:
    """As people write it."""
    return f"{version[0]}.{version[1]}"


def promised() -> Version:
    """The oldest version that the package says it runs on."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^requires-python = ">=(\d+)\.(\d+)"', text, re.MULTILINE)
    assert found is not None
    return int(found[1]), int(found[2])


def candidates(oldest: Version) -> list[str]:
    """Paths and names that may be interpreters, the ones named by the user first."""
    named = [path for path in os.environ.get("PYTHONS", "").split(os.pathsep) if path]
    on_path = [f"python3.{minor}" for minor in range(oldest[1], NEWEST_KNOWN + 1)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return [*named, *on_path, *map(str, sorted(pyenv.glob("3.*/bin/python3")))]


def pythons(oldest: Version) -> dict[Version, Python]:
    """What there is, one interpreter a version."""
    found: dict[Version, Python] = {}
    for path in candidates(oldest):
        answer = output(path, "-I", "-c", ASK)
        if answer:
            major, minor, state = answer.split(maxsplit=2)
            version = int(major), int(minor)
            if version >= oldest:
                found.setdefault(version, Python(version, path, f"{path} {state}"))
    return found


def choose(oldest: Version) -> tuple[list[Python], list[str]]:
    """The Pythons to test on, and what is missing, in words."""
    found = pythons(oldest)
    lacking = [oldest] if oldest not in {*found, OWN} else []
    if max(found, default=OWN) <= OWN:
        lacking += [(OWN[0], minor) for minor in range(NEWEST_KNOWN, OWN[1], -1)]
    if lacking and from_apt(lacking):
        found = pythons(oldest)
    newest = max(found, default=OWN)
    missing = [name(oldest)] if oldest not in {*found, OWN} else []
    if newest <= OWN:
        missing.append(f"newer than {name(OWN)}")
    return [found[version] for version in sorted({oldest, newest} & set(found) - {OWN})], missing


def from_apt(lacking: list[Version]) -> bool:
    """Install the lacking versions that apt offers, of the newer ones only the newest; True if it did."""
    if not may_install():
        return False
    try:
        if not any(Path("/var/lib/apt/lists").glob("*Packages*")):
            call("apt-get", "update", "-qq")
        offered = [one for one in lacking if output("apt-cache", "show", f"python{name(one)}-venv")]
        chosen = {one for one in offered if one < OWN} | {max(offered, default=OWN)} - {OWN}
        packages = [f"python{name(one)}{part}" for one in sorted(chosen) for part in ("", "-venv")]
        if packages:
            meet([Need("tests on another Python", tuple(packages))])
    except SystemExit as problem:  # no network, say: then it is missing
        say(f"no other Python from apt: {problem}")
        return False
    return bool(packages)


def wheel(state: str) -> Path:
    """The package as one wheel for all, built anew when a source has changed."""
    folder = FOLDER / "wheel"
    stamp = folder / "state"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != state:
        say("building one wheel for all Pythons")
        shutil.rmtree(folder, ignore_errors=True)
        build = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
        with turn():
            call(sys.executable, "-m", *build, ".")
        stamp.write_text(state, encoding="utf-8")
    (path,) = folder.glob("*.whl")
    return path


def prepare(python: Python, package: str) -> None:
    """Its environment, with the test tools and the package; reused while nothing of it has changed."""
    stamp = python.folder / "dsl-setup.json"
    state = {"tools": digest([ROOT / "pyproject.toml"]), "python": python.state}
    done: dict[str, str] = json.loads(stamp.read_text(encoding="utf-8")) if stamp.exists() else {}
    pip = (sys.executable, "-m", "pip", "--python", python.program, "install", "--quiet")
    if {**state, "package": package} == done:
        return
    if {**done, **state} != done:
        say(f"creating an environment for Python {name(python.version)}")
        call(python.path, "-m", "venv", "--clear", "--without-pip", str(python.folder))
        call(*pip, "--group", "test", str(wheel(package)))
    else:
        call(*pip, "--force-reinstall", "--no-deps", str(wheel(package)))
    stamp.write_text(json.dumps({**state, "package": package}), encoding="utf-8")


def start(python: Python) -> subprocess.Popen[bytes]:
    """The tests on that Python; their output goes to a file beside its environment."""
    environ = {**os.environ, "VIRTUAL_ENV": str(python.folder)}
    environ["PATH"] = f"{python.folder / 'bin'}{os.pathsep}{environ['PATH']}"
    command = [python.program, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "--no-unexpected-skips"]
    command += ["--hypothesis-profile=few"]  # the suite of the own Python tries more
    with log(python).open("wb") as file:
        return subprocess.Popen(
            [*command, "-m", MARKS, *TESTS], cwd=ROOT, env=environ,
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip


def log(python: Python) -> Path:
    """Output of the tests."""
    return FOLDER / f"{name(python.version)}.log"


def main() -> int:
    """Run the tests on all of them at once; 1 if one fails."""
    chosen, missing = choose(promised())
    package = digest(SOURCES)
    for python in chosen:
        prepare(python, package)
    begin = time.monotonic()
    failed = []
    for python, run in [(python, start(python)) for python in chosen]:
        code = run.wait()
        lines = log(python).read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"--- Python {name(python.version)} ({python.path})")
        told = [line for line in lines if line.startswith("SKIPPED ")] + lines[-1:]
        print("\n".join(lines if code else told), flush=True)
        failed += [name(python.version)] if code else []
    tested = ", ".join(name(python.version) for python in chosen) or "none"
    print(f"other Pythons: {tested} in {time.monotonic() - begin:.0f} s", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "")
    for lacking in missing:
        print(f"SKIPPED [1] needs a Python {lacking} (put it on PATH, or name it in PYTHONS)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
