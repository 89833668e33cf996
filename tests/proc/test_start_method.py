"""Workers that a fork server forks, started by the real commands: they end, fail, restart and are told as ever."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit import processes
from tests.kit.users import as_ordinary_user
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.forks import HIDDEN
from tests.support.functions import describe

from dsl.functions.launcher import launch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_ddp.py"

# `decimal` is what the fork server imports: an executed worker does not have it.
TELL = (
    """
import json, os, sys
facts = {
    "rank": os.environ["RANK"], "parent": os.getppid(), "forked": "decimal" in """
    + HIDDEN
    + """, "argv": sys.argv,
    "name": __name__, "file": __file__, "input": None, "cpus": sorted(os.sched_getaffinity(0)),
    "attempt": os.environ.get("TORCHELASTIC_RESTART_COUNT"),
}
path = os.path.join(sys.argv[1], facts["rank"] + "." + str(facts["attempt"]))
with open(path + ".part", "w") as file:
    json.dump(facts, file)
os.rename(path + ".part", path)
"""
)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(params=["dsl", "dslrun"])
def command(request: pytest.FixtureRequest, dsl_command: Path) -> list[str]:
    """Two workers of either command, with a fork server that imports little."""
    name = request.param
    own = ["--num_gpus=2", "--no_local_rank"] if name == "dsl" else ["--nproc-per-node=2", "--log-level=info"]
    return [str(dsl_command.with_name(name)), *own, "--start-method", "forkserver", "--preload", "decimal"]


def script_in(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def run(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return ran(words, 50, input=text or "")


def told(folder: Path) -> list[dict[str, Any]]:
    """What the workers have told, by rank and attempt."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].*[0-9e]"))]


def test_workers_are_children_of_one_fork_server(command: list[str], tmp_path: Path) -> None:
    result = run(*command, script_in(tmp_path, TELL), str(tmp_path), "--x", "y z")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    first, second = told(tmp_path)
    assert [one["forked"] for one in (first, second)] == [True, True]
    assert first["parent"] == second["parent"]
    assert [one["rank"] for one in (first, second)] == ["0", "1"]
    assert first["argv"][-3:] == [str(tmp_path), "--x", "y z"]
    assert (first["name"], first["file"]) == ("__main__", str(tmp_path / "script.py"))
    assert "warning" not in result.stderr


ENDINGS = {
    "exit": "import sys; sys.exit(3)",
    "text": "import sys; sys.exit('over')",
    "error": "raise ValueError('on purpose')",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "fault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "hard": "import os; os._exit(9)",
    "well": "",
}


def neutral(text: str) -> str:
    """What is said, without pids, times and names of the run, and of the port if another job has the usual one."""
    text = re.sub(r"dsl: master port \d+ is taken, using \d+\n", "", text)
    text = re.sub(r"\b(pid|PID)\b:? +\d+", "PID", text)
    text = re.sub(r"\d{4}-\d\d-\d\d[ _T]\d\d:\d\d:\d\d", "TIME", text)
    text = re.sub(r"^dsl: master port .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"dslrun_[0-9a-f]{16}", "RUN", text)
    return re.sub(r"after [\d.]+ m?s", "after TIME", text)


@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("ending", ENDINGS)
def test_an_end_has_the_code_and_the_verdict_of_an_executed_worker(
    ending: str, command: list[str], tmp_path: Path
) -> None:
    text = f"import os, signal\nif os.environ['RANK'] == '1':\n    {ENDINGS[ending] or 'pass'}\n"
    if ending != "well":
        text += "else:\n    signal.pause()\n"
    script = script_in(tmp_path, text)
    forked = run(*command, script)
    executed = run(*command[:3], script)
    assert forked.returncode == executed.returncode
    assert forked.stdout == executed.stdout
    assert neutral(forked.stderr) == neutral(executed.stderr)


def test_a_restart_uses_the_same_fork_server(command: list[str], tmp_path: Path) -> None:
    script = script_in(tmp_path, TELL + RESTARTS)
    result = run(*command, "--max-restarts", "1", script, str(tmp_path))
    assert result.returncode == 0, result.stderr
    parents = {one["parent"] for one in told(tmp_path)}
    assert len(parents) == 1
    assert (tmp_path / "failed").exists()
    assert all(one["forked"] for one in told(tmp_path))


RESTARTS = """
import signal
mark = os.path.join(sys.argv[1], "failed")
if not os.path.exists(mark):
    if facts["rank"] == "1":
        signal.pause()
    open(mark, "w").close()
    sys.exit(5)
"""


KILLS_ITS_PARENT = """
import signal
if facts["forked"]:
    if facts["rank"] == "1":
        os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
"""


def warnings_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in result.stderr.splitlines() if "fork server" in line]


@pytest.mark.parametrize(
    "disabled, preload, why",
    [
        ("", "decimal,no_such_module", "refused: .*no_such_module.*"),
        ("pidfd", "decimal", "cannot be watched: this kernel has no pidfds"),
    ],
)
def test_where_there_can_be_no_fork_server_workers_are_executed_and_one_line_says_why(
    disabled: str, preload: str, why: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSL_ENGINE_DISABLE", disabled)
    command[-1] = preload
    result = run(*command, "--max-restarts", "1", script_in(tmp_path, TELL + RESTARTS), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert [one["forked"] for one in told(tmp_path)] == [False] * len(told(tmp_path))
    (line,) = warnings_of(result)
    assert re.search(f": fork server 0 {why}: workers are executed instead$", line)


def test_an_interpreter_that_cannot_be_a_fork_server_executes_its_workers(
    dsl_command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os, sys\nif 'forkserver' in str(sys.orig_argv[:3]):\n    os._exit(9)\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    words = ["--nproc-per-node", "2", "--start-method", "forkserver", "--preload", "decimal"]
    result = run(str(dsl_command.with_name("dslrun")), *words, script_in(tmp_path, TELL), str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert [one["forked"] for one in told(tmp_path)] == [False, False]
    (line,) = warnings_of(result)
    assert "code 9" in line


@pytest.fixture
def running(command: list[str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job whose two workers have told of themselves and wait."""
    script = script_in(tmp_path, f"{TELL}\nimport signal\nsignal.pause()\n")
    process = subprocess.Popen(
        [*command, script, str(tmp_path)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: len(told(tmp_path)) == 2, 30)
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_a_fork_server_that_dies_takes_its_workers_and_is_named(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    (server,) = {one["parent"] for one in told(tmp_path)}
    os.kill(server, signal.SIGKILL)
    _, said = running.communicate(timeout=20)
    assert running.returncode == 137
    (line,) = [line for line in said.splitlines() if "fork server" in line]
    whose = rf"the fork server of ranks 0-1 \(pid {server}, host \w+\)"
    assert re.fullmatch(rf"\w+: {whose} was killed by SIGKILL: its workers died with it", line)
    # They are victims, and nobody is executed instead.
    assert "rank 0 (" not in said
    assert "rank 1 (" not in said


def test_workers_whose_fork_server_has_died_are_executed_when_they_start_again(
    command: list[str], tmp_path: Path
) -> None:
    script = script_in(tmp_path, TELL + KILLS_ITS_PARENT)
    result = run(*command, "--max-restarts", "1", script, str(tmp_path))
    assert result.returncode == 0, result.stderr
    verdict, lost = warnings_of(result)
    assert verdict.endswith("was killed by SIGKILL: its workers died with it")
    assert lost.endswith("warning: fork server 0 is gone: workers are executed instead")
    assert [one["forked"] for one in told(tmp_path) if one["attempt"] != "0"] == [False] * 2


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_workers_and_fork_server(
    signum: signal.Signals, running: subprocess.Popen[str], tmp_path: Path
) -> None:
    (parent,) = {one["parent"] for one in told(tmp_path)}
    server = processes.find(parent)
    assert server is not None
    running.send_signal(signum)
    assert running.wait(20) == 128 + signum
    until(lambda: not processes.alive(server), 5)


@pytest.mark.guarantee("G6")
def test_input_and_output_go_where_they_always_go(command: list[str], tmp_path: Path) -> None:
    text = "import os, sys\nprint(os.environ['RANK'], sys.stdin.read())\nprint('e', file=sys.stderr)\n"
    words = ["--log-dir", str(tmp_path / "logs"), "--tee=3", "--tag-output=never", script_in(tmp_path, text)]
    result = run(*command, *words, text="given")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0 given", "1 "]
    files = {path.parent.name: path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")}
    assert files == {"0": "0 given\n", "1": "1 \n"}


def test_each_worker_is_bound_as_asked(command: list[str], tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        command[1] = command[1].replace("2", "1")
    result = run(*command, "--bind", "auto", script_in(tmp_path, TELL), str(tmp_path))
    assert result.returncode == 0, result.stderr
    forked = [one["cpus"] for one in told(tmp_path)]
    assert all(one["forked"] for one in told(tmp_path))
    result = run(*command[:3], "--bind", "auto", script_in(tmp_path, TELL), str(tmp_path))
    assert forked == [one["cpus"] for one in told(tmp_path)]


def test_a_dry_run_names_the_fork_server_and_starts_nothing(command: list[str], tmp_path: Path) -> None:
    script = script_in(tmp_path, TELL)
    shown = run(*command, "--dry-run", script, str(tmp_path)).stdout
    assert f"fork server 0: {sys.executable} -u, which imports decimal" in shown
    assert shown.count("  forked by: fork server 0") == 2
    data = json.loads(run(*command, "--dry-run-json", script, str(tmp_path)).stdout)
    server = {"interpreter": [sys.executable, "-u"], "preload": ["decimal"], "cpus": None}
    assert data["fork_servers"] == [server]
    assert [worker["fork_server"] for worker in data["workers"]] == [0, 0]
    assert told(tmp_path) == []


def test_functions_are_called_in_workers_that_were_forked() -> None:
    plain = launch(describe, 7, nproc_per_node=2)
    forked = launch(describe, 7, nproc_per_node=2, start_method="forkserver", preload=["decimal"])
    assert forked == plain
    parents = launch(os.getppid, nproc_per_node=2, start_method="forkserver", preload=["decimal"])
    assert len(set(parents)) == 1
    assert parents[0] != os.getpid()


@pytest.mark.torch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["dsl", "dslrun"])
def test_a_training_learns_the_same(name: str, dsl_command: Path) -> None:
    count = "--num_gpus" if name == "dsl" else "--nproc-per-node"
    words = [str(dsl_command.with_name(name)), count, "2"]
    script = [str(EXAMPLE), "--device", "cpu", "--steps", "30"]
    results = [run(*words, *own, *script) for own in ([], ["--start-method", "forkserver"])]
    assert [one.returncode for one in results] == [0, 0], results[1].stderr
    assert warnings_of(results[1]) == []
    losses = [re.findall(r"^step .* loss .*$", one.stdout, re.MULTILINE) for one in results]
    assert losses[0]
    assert losses[0] == losses[1]


LOWERED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (77, 512))
"""


def test_a_limit_that_an_import_has_lowered_for_good_is_the_workers(tmp_path: Path) -> None:
    """Only root could raise it again. For others no worker started."""
    (tmp_path / "lowered.py").write_text(LOWERED)
    (tmp_path / "use.py").write_text(
        "import lowered, resource, sys\n"
        f"print(*resource.getrlimit(resource.RLIMIT_NOFILE), 'decimal' in {HIDDEN}, flush=True)\n"
    )
    words = ["--num_gpus", "2", "--no_local_rank", "--start-method", "forkserver"]
    words += ["--preload", "lowered,decimal"]
    tmp_path.chmod(0o755)
    command = as_ordinary_user([*words, "use.py"], tmp_path)
    result = ran(command, cwd=tmp_path)
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["77 512 True"] * 2), result.stderr


def test_where_the_working_directory_may_not_be_searched_workers_are_executed(tmp_path: Path) -> None:
    """Whoever is executed is there already; who is forked would have to go there."""
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    (tmp_path / "use.py").write_text(f"import os\nprint(os.getcwd(), 'decimal' in {HIDDEN})")
    words = ["--num_gpus", "2", "--no_local_rank", "--start-method", "forkserver", "--preload", "decimal"]
    tmp_path.chmod(0o755)
    command = as_ordinary_user([*words, str(tmp_path / "use.py")], tmp_path)
    result = ran(command, cwd=closed)
    assert (result.returncode, result.stdout) == (0, f"{closed} False\n" * 2), result.stderr
    assert "fork server 0 cannot be told the working directory: Permission denied" in result.stderr
