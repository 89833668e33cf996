"""What every test gets: a clean environment, a check that nothing outlives it, and the programs under test."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import hypothesis
import pytest
from scripts.environment import CODE, digest
from tests.kit import cluster, processes
from tests.kit.waiting import until
from tests.support.jobs import Helpers
from tests.support.skips import SkipWatch, skip_without_its_needs
from tests.support.steadiness import LEFT_BEHIND, watch_steadiness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")

ROOT = Path(__file__).resolve().parent.parent

MARKERS = {
    "proc": "starts real processes on this machine (every test under tests/proc)",
    "faults": "kills things and counts what is left (every test under tests/faults)",
    "cluster": "several hosts in network namespaces (every test under tests/cluster)",
    "frameworks": "runs training frameworks, the dependency group of that name (every test under tests/frameworks)",
    "engine": "repeated under all forced kernel fallbacks, as on Linux 4.18",
    "linux_5_4": "of `engine`, repeated as on Linux 5.4, too: what needs pidfds, or finds what is left of a job",
    "needs_pidfd": "of `engine`, not repeated as on Linux 4.18, which has no pidfds",
    "stress": "too long for every run; `make stress` runs it",
    "torch": "needs torch",
    "root": "needs root",
    "needs_program": "skipped where there is no program of this name",
    "needs_package": "skipped where no package of this name is installed, which the set-up installs",
    "guarantee": "holds guarantees of docs/design.md, named by their numbers; `make guarantees` lists them",
}

_HIDDEN_NAMES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "LOCAL_SIZE",
        "LOCAL_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
        *("NO_COLOR", "FORCE_COLOR", "PAGER", "LESS"),
    }
)
_LAUNCHER_PREFIXES = (
    "CROSS_",
    "DLTS_",
    "DSL_",
    "DS_",
    "FC_TASK",
    "GROUP_",
    "MASTER_",
    "OMPI_",
    "PDSH_",
    "PET_",
    "PMI",
    "ROLE_",
    "SLURM_",
    "TORCHELASTIC_",
)
_STARTS_PROCESSES = frozenset({"proc", "faults", "cluster", "frameworks", "engine", "stress", "torch"})
_KEPT = frozenset({"DSL_ENGINE_DISABLE", "DSL_ENGINE_THREADS"})  # force paths of the engine for a whole run
_TOKEN_NAME = "DSL_TEST_TOKEN"

hypothesis.settings.register_profile(
    "fast", max_examples=50, deadline=None, derandomize="CI" in os.environ, print_blob=True
)
hypothesis.settings.register_profile("few", hypothesis.settings.get_profile("fast"), max_examples=5)
hypothesis.settings.register_profile("slow", max_examples=5000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("fast")


class WaitUntil(Protocol):
    """Type of the `wait_until` fixture."""

    def __call__(self, predicate: Callable[[], _T], timeout_s: float = 10.0) -> _T:
        """First true value of `predicate`."""
        ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dsl")
    group.addoption(
        "--no-unexpected-skips",
        action="store_true",
        help="fail the run when a test is skipped for a reason that is not allowed",
    )
    group.addoption(
        "--unsteady",
        type=int,
        metavar="N",
        help="run a failed test once more; name those that pass then, and fail the run for more than N of them",
    )
    group.addoption(
        "--repeats", type=int, default=1, metavar="N", help="how often each case of the kill matrix runs"
    )


def check_that_the_package_is_current() -> None:
    """The tests run against the installed package: say so if a source has changed since."""
    stamp = Path(sys.prefix, "dsl-setup.json")
    if stamp.exists():
        installed = json.loads(stamp.read_text(encoding="utf-8")).get("code")
        if installed not in {None, digest(CODE)}:
            pytest.exit("the installed package is older than its sources: run `make build`", 3)


def pytest_configure(config: pytest.Config) -> None:
    check_that_the_package_is_current()
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.getoption("no_unexpected_skips"):
        config.pluginmanager.register(SkipWatch())
    if config.getoption("unsteady") is not None:
        watch_steadiness(config, config.getoption("unsteady"))
    # Under nohup, or in a shell's background, our children would ignore these, as they should.
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    # An installed DeepSpeed asks pytest-randomly for the seed, and would be imported, with torch, into every run.
    if (randomly := sys.modules.get("pytest_randomly")) is not None:
        vars(randomly)["entrypoint_reseeds"] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in ("proc", "faults", "cluster", "frameworks"):
            if ROOT / "tests" / name in item.path.parents:
                item.add_marker(name)
        if item.get_closest_marker("cluster"):
            item.add_marker("root")  # which makes the namespaces of the hosts
        if item.get_closest_marker("root") and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason="needs root"))
        skip_without_its_needs(item)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the helper program before any test's clock starts."""
    if any("testchild" in getattr(item, "fixturenames", ()) for item in session.items):
        _build_testchild()


@pytest.fixture(autouse=True)
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> str:
    """Hide what decides about launches and looks around the tests, devices too; mark what a test starts with a token."""
    for name in list(os.environ):
        is_hidden = name in _HIDDEN_NAMES or name.startswith(_LAUNCHER_PREFIXES)
        if is_hidden and name not in _KEPT:
            monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    token = uuid.uuid4().hex
    monkeypatch.setenv(_TOKEN_NAME, token)
    return token


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch, clean_environ: str) -> None:
    """Train with one thread a worker."""
    del clean_environ  # it would drop the variable again
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def without_cloudpickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickle with the standard library alone, here and in what a test starts."""
    folder = tmp_path / "without_cloudpickle"
    folder.mkdir()
    (folder / "cloudpickle.py").write_text("raise ImportError\n", encoding="utf-8")
    monkeypatch.delitem(sys.modules, "cloudpickle", raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times are shown in UTC in place of local time."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(autouse=True)
def no_leftovers(request: pytest.FixtureRequest, clean_environ: str) -> Iterator[None]:
    """Fail a test that leaves a process behind: one that carries its token, or a child nobody reaped (G1)."""
    if not _STARTS_PROCESSES.intersection(marker.name for marker in request.node.iter_markers()):
        yield
        return
    children = set(processes.children(os.getpid()))
    yield

    left: dict[int, str] = {}
    clean_scans = 0

    def gone() -> bool:
        # A process that is just being forked or is inside exec shows no environment, so one look proves nothing.
        nonlocal clean_scans, left
        own = children | cluster.standing()  # a host may be booted in a test, and outlive it
        orphans = set(processes.children(os.getpid())) - own
        found = [*processes.carrying(f"{_TOKEN_NAME}={clean_environ}"), *map(processes.find, orphans)]
        left = {process.pid: process.name for process in found if process is not None}
        clean_scans = 0 if left else clean_scans + 1
        return clean_scans == 3

    try:
        until(gone, 10)
    except AssertionError:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        listing = ", ".join(f"{pid} ({name})" for pid, name in sorted(left.items()))
        pytest.fail(f"{LEFT_BEHIND}: {listing}")


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """Call a predicate until it returns something true, for a bounded time; return that value."""
    return until


@pytest.fixture(scope="session")
def dsl_command() -> Path:
    """Path of the installed `dsl` program."""
    path = Path(sysconfig.get_path("scripts")) / "dsl"
    if not path.exists():
        pytest.fail(f"{path} does not exist: run `make build` first")
    return path


@pytest.fixture(scope="session")
def testchild() -> Path:
    """Path of the compiled helper program `dsl-testchild`."""
    return _target_directory() / "release" / "dsl-testchild"


@pytest.fixture
def helpers(dsl_command: Path, testchild: Path, tmp_path: Path) -> Helpers:
    """Jobs of the helper program on this machine."""
    return Helpers(dsl_command, testchild, tmp_path)


@pytest.fixture(scope="session")
def repeats(pytestconfig: pytest.Config) -> int:
    """How often each case of the kill matrix runs (`--repeats`)."""
    return int(pytestconfig.getoption("repeats"))


def _target_directory() -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


def _build_testchild() -> None:
    command = ["cargo", "build", "--quiet", "--release", "--package", "dsl-testkit"]
    if shutil.which("cargo") is None:  # that of the set-up is on no PATH but its own
        command = [str(ROOT / "scripts" / "with-environment"), "--rust", "--", *command]
    result = subprocess.run(command, cwd=ROOT, check=False)
    if result.returncode != 0:
        pytest.exit(f"{' '.join(command)} failed", 3)
