"""``--logs-specs``: a package with an entry point is installed for the test, as a user would install it."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any, Protocol
from unittest.mock import patch

import pytest
from tests.support.machine import make_facts
from tests.support.outcome import assert_one_line
from tests.support.requests import make_request

from dsl import _own_process
from dsl._record import replace
from dsl.agent.planner import Planner
from dsl.errors import OptionError
from dsl.machine import Console
from dsl.model.job import NodePlan, Route
from dsl.model.request import OutputRequest
from dsl.output.plugin import LogsPlugin, load_plugin
from dsl.plan.job import plan_job

PACKAGE = '''
import pathlib

calls = []

class Dest:
    def __init__(self, **fields):
        self.stdouts, self.stderrs, self.tee_stdouts, self.tee_stderrs, self.error_files = {}, {}, {}, {}, {}
        self.filtered_stdout = self.filtered_stderr = ""
        vars(self).update(fields)

class Files:
    """All to files below /l, of which local rank 0 is shown; as torch's default it counts attempts by itself."""

    def __init__(self, log_dir=None, redirects=None, tee=None, local_ranks_filter=None):
        calls.append((log_dir, redirects, tee, local_ranks_filter))
        self.attempts = 0

    def reify(self, envs):
        calls.append({rank: dict(env) for rank, env in envs.items()})
        self.attempts += 1
        folder = f"/l/{self.attempts}"
        for rank in envs:
            envs[rank]["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{rank}.json"
            envs[rank]["ROLE_NAME"] = "mine"
        out = {rank: f"{folder}/{rank}.out" for rank in envs}
        return Dest(
            stdouts=out,
            stderrs={rank: f"{folder}/{rank}.err" for rank in envs},
            tee_stdouts={0: out[0]},
            error_files={rank: f"{folder}/{rank}.json" for rank in envs},
            filtered_stdout=f"{folder}/some.out",
        )

def answers(**fields):
    """A plug-in that is a function, as anything that can be called may be one."""
    return lambda **asked: type("Specs", (), {"reify": lambda self, envs: Dest(**fields)})()

CONSOLE = {0: "", 1: ""}
Console = answers(stdouts=CONSOLE, stderrs=CONSOLE)
Null = answers(
    stdouts={0: "/dev/null", 1: ""}, stderrs=CONSOLE, tee_stdouts={0: "/dev/null"}, error_files={0: "/dev/null"}
)
ErrorFilesAlone = answers(stdouts=CONSOLE, stderrs=CONSOLE, error_files={0: "/e/0", 1: "/e/1"})
Lacks = answers(stdouts={0: ""}, stderrs=CONSOLE)
Paths = answers(stdouts={0: b"/l/\\xe9", 1: pathlib.Path("/l/b")}, stderrs=CONSOLE)
NoPaths = answers(stdouts={0: 1, 1: 2}, stderrs=CONSOLE)
NoMapping = answers(stdouts=["", ""], stderrs=CONSOLE)
OtherTee = answers(stdouts={0: "/l/a", 1: "/l/b"}, stderrs=CONSOLE, tee_stdouts={1: "/l/a"})

class NoAnswer:
    def __init__(self, **asked): pass
    def reify(self, envs): return None

class Raises:
    def __init__(self, **asked): pass
    def reify(self, envs): raise PermissionError(13, "Permission denied", "/l")

class Variables:
    def __init__(self, **asked): pass
    def reify(self, envs):
        envs[1]["X"] = 1
        return Dest(stdouts=CONSOLE, stderrs=CONSOLE)

class Refuses:
    def __init__(self, log_dir): pass

class Masked:
    def __init__(self, **asked):
        import signal
        calls.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

import gc
collects = gc.isenabled()
'''
NAMES = "Paths Files Console Null ErrorFilesAlone Lacks NoPaths NoMapping OtherTee NoAnswer Raises Variables Refuses Masked"


PIPE = Console()


class Package(Protocol):
    """Installs the package and returns its module."""

    def __call__(self) -> ModuleType: ...


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """A distribution with a module and its entry points, on sys.path for the time of a test."""
    name = "dsl_test_logs"
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{one.lower()} = {name}:{one}" for one in NAMES.split()]
    lines += ["gone = dsl_test_no_such_module:Files", f"missing = {name}:Missing"]
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\n" + "\n".join(lines) + "\n")
    (tmp_path / f"{name}.py").write_text(dedent(PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda: importlib.import_module(name)
    sys.modules.pop(name, None)


def _plan(plugin: LogsPlugin, attempt: int = 0, console: Console = PIPE, **asked: Any) -> NodePlan:
    """The plan of an attempt for a request with a plug-in."""
    facts = make_facts(environ={"A": "b"}, console=console)
    request = make_request("torch", nproc_per_node="2", logs_specs=plugin.name, **asked)
    with patch("dsl.output.plugin.load_plugin", return_value=plugin):
        return Planner(plan_job(request, facts), facts).plan(attempt)


def test_it_is_constructed_once_with_what_the_user_asked_for(package: Package) -> None:
    asked = OutputRequest(log_dir="/x", redirects="3", tee="0:1,12:2", local_ranks="0,2")
    load_plugin("files", asked)
    load_plugin("files", OutputRequest())
    ((log_dir, redirects, tee, ranks), nothing) = package().calls
    assert (log_dir, redirects, tee, ranks) == ("/x", 3, {0: 1, 12: 2}, {0, 2})
    assert (redirects.name, tee[0].name, tee[12].name) == ("ALL", "OUT", "ERR")
    assert nothing == (None, 0, 0, None)


def test_it_is_imported_in_a_process_as_python_leaves_it(package: Package) -> None:
    """The commands turn the collector off for themselves."""
    _own_process.claim()
    load_plugin("console", OutputRequest())
    assert package().collects


def test_maps_are_of_torchs_flags_if_the_plug_in_has_imported_torch(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Torch:
        Std = staticmethod(lambda number: f"torch's {number}")

    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.multiprocessing.api", Torch)
    load_plugin("files", OutputRequest(redirects="0:3"))
    assert package().calls == [(None, {0: "torch's 3"}, "torch's 0", None)]


def test_the_plug_in_is_told_the_variables_of_each_worker(package: Package) -> None:
    """Those that torchrun sets, not the whole environment, and no error file of ours."""
    _plan(load_plugin("files", OutputRequest()), attempt=2)
    envs = package().calls[-1]
    assert set(envs) == {0, 1}
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert expected.items() <= envs[1].items()
    assert {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "ROLE_NAME"} <= set(envs[1])
    assert not {"A", "TORCHELASTIC_ERROR_FILE"} & set(envs[1])


def test_streams_go_where_it_says_and_variables_are_what_it_made_of_them(package: Package) -> None:
    plan = _plan(load_plugin("files", OutputRequest()), log_dir="/x", redirects="3", stdout_words="loss")
    first, second = plan.workers
    tagged = Route("/l/1/0.out", console=1, prefix="[default0]:")
    assert (first.stdout, first.stderr) == (tagged, Route("/l/1/0.err"))
    assert (second.stdout, second.stderr) == (Route("/l/1/1.out"), Route("/l/1/1.err"))
    assert [worker.error_file for worker in plan.workers] == ["/l/1/0.json", "/l/1/1.json"]
    assert second.env["TORCHELASTIC_ERROR_FILE"] == "/l/1/1.json"
    assert (second.env["ROLE_NAME"], second.env["RANK"]) == ("mine", "1")
    assert plan.group.line_files == ((1, "/l/1/some.out", ("loss",)),)
    assert (plan.log_dir, plan.run_dirs) == (None, ())


def test_it_lives_on_from_attempt_to_attempt(package: Package) -> None:
    plugin = load_plugin("files", OutputRequest())
    plans = [_plan(plugin, attempt) for attempt in range(3)]
    assert [plan.workers[0].stdout.path for plan in plans] == [f"/l/{count}/0.out" for count in (1, 2, 3)]
    assert sum(isinstance(call, tuple) for call in package().calls) == 1


def test_on_a_terminal_the_worker_sees_one_and_nothing_is_shown_to_nobody(package: Package) -> None:
    plugin = load_plugin("files", OutputRequest())
    on_terminal = _plan(plugin, console=Console("terminal", "terminal"))
    tagged = Route("/l/1/0.out", console=1, terminal=True, prefix="[default0]:")
    assert on_terminal.workers[0].stdout == tagged, "as torchrun tags what is teed"
    assert _plan(plugin, console=Console("null", "null")).workers[0].stdout == Route("/l/2/0.out")


def test_the_console_is_as_without_a_plug_in(package: Package) -> None:
    plan = _plan(load_plugin("console", OutputRequest()))
    assert [(worker.stdout, worker.stderr) for worker in plan.workers] == [
        (Route(console=1), Route(console=2))
    ] * 2
    assert [worker.error_file for worker in plan.workers] == [None, None]
    assert plan.workers[0].env["TORCHELASTIC_ERROR_FILE"] == ""


def test_one_pipe_carries_both_streams_unless_the_plug_in_wants_one_of_them(package: Package) -> None:
    console = Console("other", "other", is_one=True)
    plan = _plan(load_plugin("console", OutputRequest()), console=console)
    assert [(worker.stdout, worker.stderr) for worker in plan.workers] == [(Route(console=1), None)] * 2
    first, second = _plan(load_plugin("null", OutputRequest()), console=console).workers
    assert (first.stdout, second.stdout, second.stderr) == (Route(), Route(console=1), None)


def test_what_goes_nowhere_is_no_file(package: Package) -> None:
    plan = _plan(load_plugin("null", OutputRequest()))
    assert [worker.stdout for worker in plan.workers] == [Route(), Route(console=1)]
    assert plan.workers[0].error_file is None


def test_a_path_may_be_bytes_or_an_object(package: Package) -> None:
    plan = _plan(load_plugin("paths", OutputRequest()))
    assert [worker.stdout for worker in plan.workers] == [Route("/l/\udce9"), Route("/l/b")]


def test_workers_are_told_of_error_files_that_the_plug_in_tells_us_alone(package: Package) -> None:
    plan = _plan(load_plugin("errorfilesalone", OutputRequest()))
    assert [worker.error_file for worker in plan.workers] == ["/e/0", "/e/1"]
    assert [worker.env["TORCHELASTIC_ERROR_FILE"] for worker in plan.workers] == ["/e/0", "/e/1"]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "name, asked, message",
    [
        ("nothing", {}, "no installed package has an entry point of that name in the group torchrun.logs_s"),
        ("gone", {}, "dsl_test_no_such_module:Files raised ModuleNotFoundError: No module named"),
        ("missing", {}, "dsl_test_logs:Missing raised AttributeError: "),
        ("refuses", {}, "dsl_test_logs:Refuses raised TypeError: "),
        ("raises", {}, "reify raised PermissionError: [Errno 13] Permission denied: '/l'"),
        ("noanswer", {}, "the stdouts of reify must map local ranks to paths, got None"),
        ("lacks", {}, "the stdouts of reify lack local rank 1"),
        ("nopaths", {}, "the stdouts of reify must map local ranks to paths, got {0: 1, 1: 2}"),
        ("nomapping", {}, "the stdouts of reify must map local ranks to paths, got ['', '']"),
        ("othertee", {}, "tee_stdouts of reify must name files of stdouts, but has '/l/a' for local rank 1"),
        ("variables", {}, "reify set X to 1, which is no text"),
        ("console", {"stdout_words": "a"}, "reify has no filtered_stdout, leave out the words to look for"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    name: str, asked: dict[str, Any], message: str, package: Package
) -> None:
    """With exit code 2, and before anything starts."""
    with pytest.raises(OptionError) as caught:
        _plan(load_plugin(name, OutputRequest()), **asked)
    text = str(caught.value)
    assert text.startswith(f"--logs-specs {name!r}: {message}")
    assert_one_line(text)
    assert caught.value.exit_code == 2


def test_an_unknown_name_is_told_the_known_ones(package: Package) -> None:
    with pytest.raises(OptionError, match=r"known: .*console.*files"):
        load_plugin("file", OutputRequest())


@pytest.mark.parametrize("asked", [{"redirects": "4"}, {"tee": "0:x"}, {"local_ranks": "a"}], ids=str)
def test_what_the_user_asks_of_it_is_checked_before_it_is_loaded(
    asked: dict[str, str], package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OptionError) as caught:
        load_plugin("files", OutputRequest(**asked))  # type: ignore[arg-type]
    assert "--logs-specs" not in str(caught.value)
    assert "dsl_test_logs" not in sys.modules


def test_a_plug_in_gets_no_map_by_global_rank(package: Package) -> None:
    with pytest.raises(
        OptionError, match=r"^--tee '0:1,rank2:1': a plug-in takes local ranks alone, leave out"
    ):
        load_plugin("files", OutputRequest(tee="0:1,rank2:1"))


def test_threads_of_a_plug_in_are_never_interrupted_in_our_place(package: Package) -> None:
    """What it starts inherits a mask that blocks every signal; ours is as before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    load_plugin("masked", OutputRequest())
    (mask,) = package().calls
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1} <= mask
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_code_of_others_runs_with_the_garbage_collector_of_every_program(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own command switches it off for itself."""
    calls = package().calls
    monkeypatch.setattr(_own_process, "restore", lambda: calls.append("restored"))
    plugin = load_plugin("files", OutputRequest())
    first = calls.index("restored")
    assert first < next(index for index, call in enumerate(calls) if isinstance(call, tuple))
    del calls[:]
    plugin.ask(_plan(load_plugin("console", OutputRequest())))
    assert calls[-2] == "restored"
    assert set(calls[-1]) == {0, 1}


@pytest.mark.torch
def test_torchs_own_default_is_a_plug_in(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are those that we would choose: LOG_DIR/RUN_ID_*/attempt_N/LOCAL_RANK/stdout.log."""
    api = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    monkeypatch.setattr(package(), "Files", api.DefaultLogsSpecs)
    logs = tmp_path / "logs"
    plugin = load_plugin("files", OutputRequest(log_dir=str(logs), redirects="2", tee="1", local_ranks="1"))
    for attempt in range(2):
        plan = _plan(plugin, attempt)
        (run_dir,) = logs.iterdir()
        assert run_dir.name.startswith(plan.env["TORCHELASTIC_RUN_ID"] + "_")
        for rank, worker in enumerate(plan.workers):
            folder = run_dir / f"attempt_{attempt}" / str(rank)
            assert folder.is_dir()
            shown = Route(os.fspath(folder / "stdout.log"))
            if rank == 1:
                shown = replace(shown, console=1, prefix="[default1]:")
            assert (worker.stdout, worker.stderr) == (shown, Route(os.fspath(folder / "stderr.log")))
            assert (
                worker.error_file == worker.env["TORCHELASTIC_ERROR_FILE"] == os.fspath(folder / "error.json")
            )
