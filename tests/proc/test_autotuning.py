"""Experiments are jobs on slots: side by side, judged by what they leave, and known again."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.jobs import states
from tests.support.terminal import terminal
from tests.support.tunings import SCRIPT, Tuning

# Many whole commands, four at a time, on a machine that may be busy.
pytestmark = pytest.mark.timeout(120)

SHOW_CURSOR = b"\x1b[?25h"
STARTS = ((), ("--start-method", "forkserver", "--preload", "json"))
"""Workers that are executed, or that a fork server forks which all experiments share."""


@pytest.fixture
def tuning(dsl_command: Path, tmp_path: Path) -> Tuning:
    return Tuning(dsl_command, tmp_path)


@pytest.mark.parametrize("options", STARTS)
def test_twenty_experiments_share_four_slots_and_never_one(tuning: Tuning, options: tuple[str, ...]) -> None:
    tuning.configure(n=list(range(1, 21)))
    tuning.run_well("tune", *options)
    begun = tuning.runs("begin")
    assert sorted(one["n"] for one in begun) == list(range(1, 21))
    assert {one["slots"] for one in begun} <= {"0", "1", "2", "3"}
    assert tuning.runs("doubled") == []
    assert {one["world_size"] for one in begun} == {"1"}
    assert tuning.best() == {"n": 20}
    if options:
        assert len({one["server"] for one in begun}) == 1


def test_two_experiments_run_at_once_on_slots_and_ports_of_their_own(tuning: Tuning) -> None:
    tuning.hosts("localhost slots=2")
    tuning.configure(n=[1, 2], wait_for=[2])
    tuning.run_well()
    begun = tuning.runs("begin")
    assert sorted(one["slots"] for one in begun) == ["0", "1"]
    assert len({one["master_port"] for one in begun}) == 2


def test_an_experiment_gets_the_real_slots_of_a_filter(tuning: Tuning) -> None:
    tuning.run_well("tune", "-i", "localhost:1,3")
    assert {(one["slots"], one["world_size"]) for one in tuning.runs("begin")} == {("1,3", "2")}
    assert "29500" not in {one["master_port"] for one in tuning.runs("begin")}  # other jobs may want it


@pytest.mark.parametrize("options", STARTS)
def test_what_goes_wrong_is_recorded_as_what_it_is(tuning: Tuning, options: tuple[str, ...]) -> None:
    acts = ["ok", "oom", "crash", "hang", "silent", "other", "torn", "noisy"]
    tuning.configure({"exp_timeout_s": 6}, act=acts, n=[5])
    tuning.run_well("tune", *options)
    known = tuning.outcomes("act")
    assert {act: one["outcome"] for act, one in known.items()} == {
        "ok": "ok",
        "oom": "oom",
        "crash": "crash",
        "hang": "timeout",
        "silent": "no metric",
        "other": "no metric",
        "torn": "torn metric",
        "noisy": "ok",
    }
    assert known["crash"]["exit_code"] == 7
    assert "CUDA out of memory" in known["oom"]["reason"]
    assert tuning.best()["act"] in ("ok", "noisy")


@pytest.mark.parametrize("options", STARTS)
def test_an_experiment_that_removes_its_folder_or_writes_no_file_costs_itself_alone(
    tuning: Tuning, options: tuple[str, ...]
) -> None:
    tuning.configure(act=["tidy", "pipe", "folder", "ok"], n=[5])
    tuning.run_well("tune", *options)
    trials = json.loads((tuning.results / "summary.json").read_text())["trials"]
    assert {one["config"]["act"]: one["reason"] for one in trials} == {
        "tidy": "it ended well and wrote no metrics: its folder is gone",
        "pipe": "it ended well and wrote no metrics: a pipe is at autotuning.metric_path",
        "folder": "it ended well and wrote no metrics: a folder is at autotuning.metric_path",
        "ok": None,
    }
    tuning.run_well("tune", *options)
    assert len(tuning.runs("begin")) == 4


def test_a_tuning_in_which_nothing_runs_ends_with_a_failure(tuning: Tuning) -> None:
    tuning.configure(act=["crash", "oom"], n=[5])
    result = tuning.run("run")
    assert result.returncode == 1
    assert "no experiment ran well" in result.stderr
    assert tuning.runs("trained") == []
    assert not (tuning.results / "cmd_optimal.txt").exists()


def test_run_trains_with_the_best_config_and_the_words_of_the_user(tuning: Tuning) -> None:
    args = ("--note", "a b", "it's", "", '"q"', "--micro", "1")
    tuning.configure({"arg_mappings": {"n": "--micro"}}, n=[1, 3, 2])
    tuning.run_well("run", "--no_local_rank", args=args)
    (trained,) = tuning.runs("trained")
    assert trained["config"] == {"n": 3}
    optimal = str(tuning.results / "ds_config_optimal.json")
    note = ["--note", "a b", "it's", "", '"q"']
    assert trained["words"] == [*note, "--micro", "3", "--deepspeed_config", optimal]
    tried = {one["n"]: one["words"] for one in tuning.runs("begin")[:3]}
    assert tried == {n: [*note, "--micro", str(n), "--deepspeed_config"] for n in (1, 2, 3)}


def test_the_exit_code_of_run_is_that_of_the_training(tuning: Tuning) -> None:
    (tuning.folder / "fails.py").write_text(
        f"import sys, runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "if 'optimal' in sys.argv[-1]: sys.exit(9)\n"
    )
    words = tuning.words("run")
    words[words.index(str(SCRIPT))] = "fails.py"
    result = subprocess.run(
        words, cwd=tuning.folder, env=tuning.environ, capture_output=True, check=False, timeout=60
    )
    assert result.returncode == 9


def test_what_is_known_is_not_run_again(tuning: Tuning) -> None:
    tuning.run_well()
    tuning.run_well()
    assert len(tuning.runs("begin")) == 3
    tuning.run_well("run")
    assert [one["what"] for one in tuning.runs("trained")] == ["trained"]
    assert len(tuning.runs("begin")) == 4
    # Another script argument is another experiment.
    tuning.run_well(args=("--lr", "2"))
    assert len(tuning.runs("begin")) == 7


def test_a_quiet_tuning_shows_its_table_alone(tuning: Tuning) -> None:
    tuning.configure(n=[1, 2])
    result = tuning.run("tune", "--quiet")
    assert (result.returncode, result.stderr) == (0, "")
    assert "| global " in result.stdout


def test_a_tuning_without_standard_streams_tunes_and_trains(tuning: Tuning) -> None:
    tuning.configure(n=[1, 2])
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *tuning.words("run")]
    result = subprocess.run(closed, cwd=tuning.folder, env=tuning.environ, check=False, timeout=60)
    assert result.returncode == 0
    assert [one["config"] for one in tuning.runs("trained")] == [{"n": 2}]


def test_another_config_keeps_what_the_first_has_found(tuning: Tuning) -> None:
    tuning.configure(n=[1, 2, 3], lr=[1])
    tuning.run_well()
    tuning.configure(n=[1, 2, 3], lr=[2])
    tuning.run_well()
    assert tuning.best() == {"n": 3, "lr": 2}
    assert len(list(tuning.results.glob("n=?@*/result.json"))) == 3
    tuning.configure(n=[1, 2, 3], lr=[1])
    tuning.run_well()
    assert len(tuning.runs("begin")) == 6, "what was put aside is known again"
    assert tuning.best() == {"n": 3, "lr": 1}


def test_failures_are_tried_again_only_after_a_tuning_in_which_nothing_ran(tuning: Tuning) -> None:
    tuning.configure(act=["crash", "oom"], n=[5])
    assert tuning.run().returncode == 1
    assert tuning.run().returncode == 1
    assert len(tuning.runs("begin")) == 4
    tuning.configure(act=["crash", "ok"], n=[6])
    tuning.run_well()
    result = tuning.run_well()
    assert len(tuning.runs("begin")) == 6
    assert "known from before: remove its folder to run it again" in result.stderr


def test_overwrite_begins_anew_and_removes_nothing_of_others(tuning: Tuning) -> None:
    tuning.configure({"overwrite": True}, n=[1, 2, 3])
    tuning.run_well()
    (tuning.results / "mine.txt").write_text("mine")
    tuning.run_well()
    assert len(tuning.runs("begin")) == 6
    assert (tuning.results / "mine.txt").read_text() == "mine"


def test_a_folder_of_others_is_one_line(tuning: Tuning) -> None:
    tuning.results.mkdir()
    (tuning.results / "mine.txt").write_text("mine")
    result = tuning.run()
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "holds files that no tuning has written" in line
    assert tuning.runs("begin") == []


@pytest.mark.parametrize("options", STARTS)
@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_a_signal_keeps_what_is_known_and_the_same_command_goes_on(
    tuning: Tuning, signum: signal.Signals, code: int, options: tuple[str, ...]
) -> None:
    tuning.configure(act=["ok", "hang"], n=[5])
    with tuning.running("tune", "--grace", "1", *options) as process:
        until(lambda: len(tuning.runs("begin")) == 2 and tuning.outcomes("act"), 60)
        process.send_signal(signum)
        _, said = process.communicate(timeout=30)
    assert process.returncode == code, said
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert list(tuning.outcomes("act")) == ["ok"]
    tuning.configure({"exp_timeout_s": 1}, act=["ok", "silent"], n=[5])
    tuning.run_well("tune", "--grace", "1", *options)


@pytest.mark.parametrize("options", STARTS)
def test_nothing_is_left_when_the_tuner_is_killed(tuning: Tuning, options: tuple[str, ...]) -> None:
    tuning.configure(act=["ok", "hang"], n=[1])
    with tuning.running("tune", *options):
        until(lambda: any(one["act"] == "hang" for one in tuning.runs("begin")))
    # Killed. `no_leftovers` finds every process that carries the token of this test.


def kill(tuning: Tuning, chance: random.Random) -> None:
    """Kill a tuning at some point."""
    after = chance.randrange(0, 25)
    with tuning.running() as process:
        until(
            lambda: len(tuning.runs("begin") + tuning.runs("end")) >= after or process.poll() is not None, 60
        )
        time.sleep(chance.random() * 0.05)  # a point between two events, not a wait for something


@pytest.mark.parametrize(
    "seeds",
    [(1,), (2,), *(pytest.param(range(100 * n, 100 * n + 3), marks=pytest.mark.stress) for n in range(20))],
)
def test_a_tuning_that_was_killed_at_any_point_goes_on(tuning: Tuning, seeds: Sequence[int]) -> None:
    """Each point follows from a seed."""
    tuning.configure(n=list(range(1, 13)))
    for seed in seeds:
        kill(tuning, random.Random(seed))
    tuning.run_well()
    ended = [one["n"] for one in tuning.runs("end")]
    assert len(ended) == len(set(ended)), "an experiment that had ended ran again"
    assert tuning.runs("doubled") == []
    assert tuning.best() == {"n": 12}
    found = {n: one["metrics"]["throughput"] for n, one in tuning.outcomes("n").items()}
    assert found == {n: float(n) for n in range(1, 13)}


def test_what_is_written_down_of_an_experiment_and_its_command_trains_in_a_shell(tuning: Tuning) -> None:
    tuning.run_well("tune", "--no_local_rank", args=("a b", "$HOME"))
    line = (tuning.results / "cmd_optimal.txt").read_text()
    assert shlex.split(line)[0] == "dsl"
    subprocess.run(["sh", "-c", line], cwd=tuning.folder, env=tuning.environ, check=True, timeout=60)
    (trained,) = tuning.runs("trained")
    assert trained["words"][:2] == ["a b", "$HOME"]
    assert trained["config"] == {"n": 3}
    for path in tuning.results.glob("*/exp.json"):
        exp = json.loads(path.read_text())
        folder = path.parent
        assert exp["result_dir"] == str(folder)
        assert json.loads(urlsafe_b64decode(exp["ds_config_base64"])) == exp["ds_config"]
        assert {"exp_id", "user", "job_id", "master_port", "launcher_args", "ds_config_path"} <= exp.keys()
        assert exp["ds_config"] == json.loads((folder / "ds_config.json").read_text())
        assert (exp["num_nodes"], exp["num_gpus"], exp["hostfile"]) == (1, 1, "hosts")
        words = shlex.split((folder / "cmd.txt").read_text())
        assert words[0] == "dsl"
        assert "a b" in words
        assert {"stdout.log", "stderr.log", "metrics.json"} <= {one.name for one in folder.iterdir()}
        description = json.loads((tuning.folder / "autotuning_exps" / f"{exp['name']}.json").read_text())
        assert description["ds_config"] == exp["ds_config"]


@pytest.mark.needs_package("rich")
@pytest.mark.parametrize("options", STARTS, ids=("executed", "forked"))
def test_ctrl_z_stops_the_experiments_too_and_fg_brings_all_back(
    options: tuple[str, ...], tuning: Tuning
) -> None:
    """What has measured the pause is run once more."""
    tuning.hosts("localhost slots=1")
    tuning.configure(n=[1, 2], act=["pause"])
    line = ["/usr/bin/env", "-C", str(tuning.folder), *tuning.words("tune", *options)]
    with terminal(line, {**tuning.environ, "TERM": "xterm"}) as screen:
        until(lambda: tuning.runs("begin"))
        (pid,) = [one["pid"] for one in tuning.runs("begin")]
        screen.press(b"\x1a")
        screen.reported("stopped")
        until(lambda: states([pid]) == {"T"})
        assert SHOW_CURSOR in screen.shown()
        screen.resume()
        screen.reported("ended 0", 60)
    assert [one["n"] for one in tuning.runs("end")] == [1, 1, 2]
    assert {one["outcome"] for one in tuning.outcomes("n").values()} == {"ok"}


def test_a_command_that_dies_costs_one_experiment_and_a_server_that_dies_costs_none(tuning: Tuning) -> None:
    """The processes of the experiment die with its command; another server forks the next workers."""
    tuning.hosts("localhost slots=1")
    tuning.configure(act=["hang", "pause", "ok"], n=[5])
    with tuning.running("tune", *STARTS[1]) as process:
        until(lambda: tuning.runs("begin"))
        (command,) = processes.children(process.pid)
        os.kill(command, signal.SIGKILL)
        until(lambda: len(tuning.runs("begin")) == 2)
        first, second = tuning.runs("begin")
        assert first["server"] == second["server"]
        os.kill(second["server"], signal.SIGKILL)
        os.kill(second["pid"], signal.SIGCONT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert tuning.runs("begin")[2]["server"] != first["server"]
    assert {act: one["outcome"] for act, one in tuning.outcomes("act").items()} == {
        "hang": "crash",
        "pause": "ok",
        "ok": "ok",
    }


def test_an_experiment_that_ignores_signals_is_killed_and_its_server_goes_on(tuning: Tuning) -> None:
    tuning.hosts("localhost slots=1")
    tuning.configure({"exp_timeout_s": 6}, act=["deaf", "ok"], n=[5])
    tuning.run_well("tune", "--grace", "0.2", *STARTS[1])
    assert {act: one["outcome"] for act, one in tuning.outcomes("act").items()} == {
        "deaf": "timeout",
        "ok": "ok",
    }
    assert len({one["server"] for one in tuning.runs("begin")}) == 1


TUNING = """
import sys
from dsl.tune.show import Progress
from dsl.tune.experiment import Experiment, Resources, Result, Summary
from dsl.errors import AutotuningError
from dsl.machine.files import Folder
from dsl.tune.config import Section

def say(text):
    print("SAID", text, file=sys.stderr, flush=True)

expected = int(sys.argv[2]) if sys.argv[2].isdecimal() else None
progress = Progress(lambda notice: say(notice.line), Section(), Folder(sys.argv[1], AutotuningError), Resources(1, 1, 1, None), expected, is_quiet="quiet" in sys.argv)
first, second = (Experiment(f"z0_gas1_tmbspg{n}", {}, "run", "z0") for n in (1, 2))
progress.began(first)
input()
progress.ended(first, Result("ok", {"throughput": 8.25}, "", 0, 1.0), is_reused=False)
progress.began(second)
input()
progress.ended(second, Result("crash", {}, "[red]boom[/]", 1, 1.0), is_reused=False)
progress.pause()
progress.pause()
say("the end")
"""


@pytest.mark.needs_package("rich")
def test_a_bar_shows_the_best_so_far_and_what_runs_and_goes_without_a_trace(tmp_path: Path) -> None:
    line = [sys.executable, "-c", TUNING, str(tmp_path), "?"]
    with terminal(line, {"TERM": "xterm", "COLUMNS": "120"}) as screen:
        screen.showed("0 done")
        screen.showed("best: none yet; runs: z0_gas1_tmbspg1")
        screen.press(b"\n")
        screen.showed("z0_gas1_tmbspg1: throughput 8.25, the best so far")
        screen.showed("best: z0_gas1_tmbspg1 throughput 8.25; runs: z0_gas1_tmbspg2")
        screen.press(b"\n")
        screen.showed("z0_gas1_tmbspg2: crash, [red]boom[/]")
        screen.showed(SHOW_CURSOR.decode())
        screen.showed("SAID the end")
        screen.reported("ended 0")


@pytest.mark.needs_package("rich")
def test_a_bar_that_knows_how_many_there_are_shows_the_time_left(tmp_path: Path) -> None:
    line = [sys.executable, "-c", TUNING, str(tmp_path), "3"]
    with terminal(line, {"TERM": "xterm", "COLUMNS": "120"}) as screen:
        screen.showed("0 of 3 done")
        assert b"left" not in screen.shown()
        screen.press(b"\n")
        screen.showed("1 of 3 done")
        screen.showed("0:00:0")  # what two more take
        screen.showed(" left")
        screen.press(b"\n")
        screen.showed("2 of 3 done")
        screen.reported("ended 0")


@pytest.mark.parametrize(
    "environ, words",
    [({"TERM": "dumb"}, []), ({"TERM": "xterm", "JPY_PARENT_PID": "7"}, []), ({"TERM": "xterm"}, ["quiet"])],
)
def test_a_quiet_tuning_and_a_terminal_that_cannot_redraw_a_line_get_plain_ones(
    environ: dict[str, str], words: list[str], tmp_path: Path
) -> None:
    line = [sys.executable, "-c", TUNING, str(tmp_path), "?", *words]
    with terminal(line, environ) as screen:
        screen.press(b"\n")
        screen.showed("SAID z0_gas1_tmbspg1: throughput 8.25, the best so far")
        screen.press(b"\n")
        screen.showed("SAID the end")
        screen.reported("ended 0")
        assert b"\x1b" not in screen.shown()
