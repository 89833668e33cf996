"""``dsl --autotuning``: finds the config with which the job runs best, and trains with it.

Experiments run side by side: each is a ``dsl`` command of its own, which the engine supervises.

A command of its own has a guard, a cgroup and a process tree that is killed as a whole. It reaches other
hosts by any launcher, and dies with us however we end. It costs the start of a Python, some tens of
milliseconds.

If the user wants fork servers, the tuner holds warm ones, which fork the workers of all experiments: the
imports of the script run once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from shlex import join
from types import FrameType
from typing import Any

from dsl import EngineError, Exited, LaunchSpec, Stdio, Supervisor, WorkerSpec, __version__, _own_process
from dsl._own_process import START
from dsl._record import replace
from dsl.agent.background import become
from dsl.agent.session import die_of_interrupt
from dsl.agent.warm import HeldServers
from dsl.errors import AutotuningError
from dsl.facts import this_machine
from dsl.model.job import Notice
from dsl.model.request import LEVELS, ElasticRequest, Request
from dsl.report.speak import say
from dsl.tune.config import AUTOTUNING, encode, fingerprint, metric_keys, section_of, without_tuning
from dsl.tune.experiment import Done, Experiment, ExperimentOutput, Result, Summary, judge
from dsl.tune.folders import END, OPTIMAL_COMMAND, OPTIMAL_CONFIG, PATH_KEYS, Folders
from dsl.tune.search import count_configs, search
from dsl.tune.setup import REPLACED, Setup, SlotGroup, SlotPool, UserWords, as_filter, set_up
from dsl.tune.show import Progress
from dsl.tune.steps import Steps

COMMAND = "dsl"
START_DSL = f"{START}from dsl.__main__ import main; sys.exit(main())"
"""Python code of the command ``dsl``."""

MARGIN_S = 1.0
"""Seconds after the grace of its workers, for the command of an experiment to end."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)

START_EXPERIMENT = (
    f"{START}from dsl import _own_process; _own_process.claim(); from dsl.report import speak; "
    "speak.end_path = sys.argv.pop(1); from dsl.__main__ import main; sys.exit(main())"
)
"""Python code of an experiment. The first word behind it is the file for the facts of its end."""

MEASURED = ("metric", "start_profile_step", "end_profile_step", "exp_timeout_s", "model_info")
"""Keys of the section that matter to an experiment; the other keys matter only to the search."""

JOB_IDS = ("DLWS_JOB_ID", "DLTS_JOB_ID")
"""Variables with the name of the job, as in DeepSpeed."""

STOPPED = Result("stopped", {}, "it was stopped", 1, 0.0)


def tune(request: Request, words: tuple[tuple[str, str], ...], *, trains: bool) -> int:
    """Find the best config, write it to a file, and train with it if ``trains``.

    ``words`` are the user's options, each with the name of its value. Returns the exit code: 0 if there is a
    best config, 1 if not, 128 + the signal that ended the tuning. If it trains, this process becomes the
    training.

    Raises:
        DslError: something is wrong with the job, its config or a folder.
    """
    least = LEVELS[request.log_level]

    def tell(notice: Notice) -> None:
        if LEVELS[notice.level] >= least:
            say(COMMAND, notice.line)

    _own_process.fill_standard_streams()
    _own_process.restore()
    facts = this_machine()
    request = replace(request, elastic=ElasticRequest())
    setup, config, notices = set_up(request, UserWords(words), facts)
    for notice in notices:
        tell(notice)
    _begin(setup, config)  # raises before any folder is made if there is nothing to tune
    folders = Folders(setup.section.results_dir, setup.section.exps_dir)
    expected, is_quiet = count_configs(setup.section), least > LEVELS["info"]
    progress = Progress(tell, setup.section, folders.results, setup.size, expected, is_quiet=is_quiet)
    try:
        if setup.section.overwrite and folders.is_finished():
            folders.empty()
        setup = keep_memory(setup, config, folders)
        steps, batch = _begin(setup, config)
        folders.mark(is_finished=False)
        summary, signals = run_search(steps, batch, setup, folders, progress)
        command = save_optimal(setup, summary.best, folders)
        folders.mark(is_finished=not signals)
        progress.finish(summary)
    finally:
        progress.pause()
        folders.close()
    if signals:
        known = f"stopped; {folders.results_dir} has what is known"
        again = join((COMMAND, *setup.words(setup.user.without(), setup.program.args)))
        say(COMMAND, f"{known}, and the same command goes on: {again}")
        if signals[0] == signal.SIGINT:
            die_of_interrupt()
        return 128 + signals[0]
    if not command:
        why = f"no experiment ran well, see {folders.results_dir}"
        say(COMMAND, f"error: {why}; the same command tries them again")
        return 1
    optimal = f"{folders.results_dir}/{OPTIMAL_CONFIG}"
    if trains:
        tell(Notice("info", f"training with {optimal}"))
        become((sys.executable, "-c", START_DSL, *command))
    tell(Notice("info", f"best config: {optimal}, the command is in {OPTIMAL_COMMAND} there"))
    return 0


def _begin(setup: Setup, config: Mapping[str, object]) -> tuple[Steps[Summary], Sequence[Experiment]]:
    """A search and its first experiments. Raises AutotuningError if there are none."""
    steps = search(setup.section, config, setup.size)
    try:
        return steps, next(steps)
    except StopIteration as end:
        raise AutotuningError("; ".join(("nothing can be tried", *end.value.notes))) from None


def keep_memory(setup: Setup, config: Mapping[str, object], folders: Folders) -> Setup:
    """The setup with the memory size that this tuning recorded at its start; a new tuning records it now."""
    if setup.section.device_memory is not None:
        return setup
    size = setup.size
    tuning = fingerprint(
        without_tuning(config),
        [setup.program.script, setup.script_digest, *setup.program.args],
        list(setup.trial_words),
        [size.nodes, size.slots_per_node, size.lanes, setup.device, setup.visible],
    )
    return replace(setup, size=replace(size, memory_bytes=folders.keep_memory(tuning, size.memory_bytes)))


def run_search(
    steps: Steps[Summary], batch: Sequence[Experiment], setup: Setup, folders: Folders, progress: Progress
) -> tuple[Summary, list[int]]:
    """The result of the search, and the signals that have ended it."""
    runners = Runners(setup.environ, setup.section.exp_timeout_s, setup.grace_s)
    held = HeldServers()
    tuner = Tuner(setup, folders, runners, held, progress)
    try:
        with runners:
            summary = tuner.run(steps, batch)
        tuner.listen()
        return summary, tuner.signals
    finally:
        runners.close()
        held.close()


def save_optimal(setup: Setup, best: Experiment | None, folders: Folders) -> tuple[str, ...]:
    """Write the best config to its file, or remove an old one; return the command that trains with it."""
    if best is None:
        folders.forget_optimal()
        return ()
    config = without_tuning(best.config)
    path = f"{folders.results_dir}/{OPTIMAL_CONFIG}"
    options = (*setup.user.without(*REPLACED), *setup.own_words())
    words = setup.words(options, setup.args_for(config, path))
    folders.save_optimal(config, join((COMMAND, *words)))
    return words


class _Running:
    """An experiment whose command runs."""

    def __init__(self, name: str, limit_s: float) -> None:
        self.name, self.stop = name, ""
        self.begin_s = time.monotonic()
        self.deadline_s = self.begin_s + limit_s if limit_s else None
        """`time.monotonic` when we end the experiment, and later when we kill it."""


class Runners:
    """Runs experiments side by side. In a ``with`` block signals wait for `wait` and `heard`."""

    def __init__(self, environ: Mapping[str, str], limit_s: float, grace_s: float) -> None:
        """Begin a group of experiments with this environment. Raises AutotuningError.

        ``limit_s``: seconds that an experiment may take, 0: no limit; ``grace_s``: those that its workers get
        between SIGTERM and SIGKILL.
        """
        self._limit_s, self._grace_s = limit_s, grace_s + MARGIN_S
        group = LaunchSpec(
            (), environ, on_failure="report", grace_s=self._grace_s, stays_open=True, inherits=True
        )
        try:
            self._supervisor = Supervisor()
            self._supervisor.start(group)
        except EngineError as error:
            raise AutotuningError(f"no experiment can be started: {error}") from None
        self._running: dict[int, _Running] = {}
        """Experiments by the engine's numbers of their commands."""
        self._failed: list[Done] = []
        """Experiments that could not be started."""
        self._heard: list[int] = []
        """Numbers of signals that have come."""
        self._old: dict[int, Any] = {}

    def __enter__(self) -> None:
        """Take the signals. Ignored signals stay ignored (nohup)."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self.hear)

    def __exit__(self, *_: object) -> None:
        """Give the signals back."""
        for number, old in self._old.items():
            signal.signal(number, old)

    @property
    def running(self) -> int:
        """How many experiments run."""
        return len(self._running) + len(self._failed)

    def start(self, name: str, words: Sequence[str], folder: str, env: Mapping[str, str]) -> None:
        """Start an experiment with variables of its own; `wait` returns its end.

        ``words``: those behind ``dsl`` in its command; ``folder``: where its output goes.
        """
        worker = WorkerSpec(
            (sys.executable, "-c", START_EXPERIMENT, f"{folder}/{END}", *words),
            env=env,
            stdout=Stdio.file(f"{folder}/stdout.log", append=True),
            stderr=Stdio.file(f"{folder}/stderr.log", append=True),
        )
        try:
            self._running[self._supervisor.add(worker)] = _Running(name, self._limit_s)
        except EngineError as error:
            self._failed.append(Done(name, 1, 0.0, error=str(error)))

    def hear(self, number: int, _frame: FrameType | None = None) -> None:
        """Take a signal, which ends `wait`."""
        self._heard.append(number)
        self._supervisor.wake()

    def heard(self) -> list[int]:
        """Numbers of signals that have come; does not wait."""
        numbers: list[int] = []
        while self._heard:
            number = self._heard.pop(0)
            # A user who presses Ctrl-Z twice wants one pause.
            if number != signal.SIGTSTP or number not in numbers:
                numbers.append(number)
        return numbers

    def wait(self) -> tuple[list[Done], list[int]]:
        """Wait for something: experiments that have ended, and numbers of signals that have come."""
        done: list[Done] = []
        signals = self.heard()
        while not (done or signals):
            done, self._failed = self._failed or self._look(), []
            signals = self.heard()
        return done, signals

    def stop(self, *, at_once: bool = False) -> None:
        """End all experiments, for good. `wait` still has to return those that run."""
        for run in self._running.values():
            run.stop = run.stop or "stopped"
            run.deadline_s = None
        self._supervisor.stop(grace_s=0.0 if at_once else self._grace_s)

    def suspend(self) -> None:
        """Stop all experiments and this process, as Ctrl-Z stops a program, until a shell continues it."""
        begin_s = time.monotonic()
        self._supervisor.signal(signal.SIGTSTP)
        self._supervisor.pids()  # the answer comes when the signal is sent: the engine's thread stops with us
        old = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when we are continued, or at once without a shell
        signal.signal(signal.SIGTSTP, old)
        self._supervisor.signal(signal.SIGCONT)
        for run in self._running.values():
            if run.deadline_s is not None:  # the pause does not count as time
                run.deadline_s += time.monotonic() - begin_s

    def close(self) -> None:
        """End what runs, and wait for it."""
        self._supervisor.close()

    def _look(self) -> list[Done]:
        """Wait for experiments that end, and end those whose time is over."""
        due = [run.deadline_s for run in self._running.values() if run.deadline_s is not None]
        left_s = max(min(due) - time.monotonic(), 0.0) if due else None
        done = []
        for event in self._supervisor.wait(left_s):
            if isinstance(event, Exited):
                run = self._running.pop(event.exit.worker)
                elapsed_s = time.monotonic() - run.begin_s
                done.append(Done(run.name, event.exit.status, elapsed_s, run.stop))
        for worker, run in self._running.items():
            if run.deadline_s is not None and run.deadline_s <= time.monotonic():
                self._supervisor.signal(signal.SIGKILL if run.stop else signal.SIGTERM, worker)
                run.deadline_s = None if run.stop else time.monotonic() + self._grace_s
                run.stop = "timeout"
        return done


class Tuner:
    """Runs the experiments of one search."""

    def __init__(
        self, setup: Setup, folders: Folders, runners: Runners, held: HeldServers, progress: Progress
    ) -> None:
        self._setup = setup
        self._folders = folders
        self._runners = runners
        self._held = held
        self._progress = progress
        self._slots = SlotPool(setup.hosts, setup.size.nodes, setup.size.slots_per_node)
        self._places: dict[str, tuple[Experiment, SlotGroup]] = {}
        self._count = 0
        """How many experiments have begun."""
        self._paused: set[str] = set()
        """Experiments that were paused: the times that they measure are wrong."""
        self.signals: list[int] = []
        """Signals that asked for the end, in order."""

    def run(self, search: Steps[Summary], batch: Sequence[Experiment]) -> Summary:
        """Run what a search wants until it ends. A signal ends it early, with a summary of what is known.

        ``batch``: the first experiments that the search wants.

        Raises:
            AutotuningError: a file cannot be written.
        """
        while True:
            try:
                batch = search.send(self._run_batch(batch))
            except StopIteration as end:
                summary: Summary = end.value
                return summary

    def listen(self) -> None:
        """Handle signals that have come. We wait for signals only while experiments run."""
        for number in self._runners.heard():
            self._hear(number)

    def _run_batch(self, batch: Sequence[Experiment]) -> dict[str, Result]:
        self.listen()
        results: dict[str, Result] = {}
        waiting: deque[Experiment] = deque()
        for experiment in batch:
            known = self._known(experiment)
            if known is None:
                waiting.append(experiment)
            else:
                results[experiment.name] = known
                self._progress.ended(experiment, known, is_reused=True)
        while waiting or self._runners.running:
            while waiting and not self.signals and (place := self._slots.take()) is not None:
                self._start(waiting.popleft(), place)
            if not self._runners.running:
                break
            done, signals = self._runners.wait()
            for number in signals:
                self._hear(number)
            for end in done:
                experiment, place = self._places.pop(end.name)
                self._slots.give_back(place)
                if self._has_to_run_again(experiment, end):
                    waiting.append(experiment)
                    continue
                results[experiment.name] = result = self._judge(experiment, end)
                self._progress.ended(experiment, result, is_reused=False)
        return {**results, **dict.fromkeys([experiment.name for experiment in waiting], STOPPED)}

    def _hear(self, number: int) -> None:
        """Handle a signal: Ctrl-Z pauses; the first of the others ends the experiments, the second kills."""
        if number == signal.SIGTSTP:
            self._progress.pause()
            self._paused.update(self._places)
            for experiment, _ in self._places.values():
                self._folders.distrust(experiment)
            self._runners.suspend()
            self._progress.go_on()
            return
        self._runners.stop(at_once=bool(self.signals))
        self.signals.append(number)

    def _has_to_run_again(self, experiment: Experiment, done: Done) -> bool:
        """Whether a pause has spoiled the times that an experiment measured, or may have made it fail."""
        was_paused = experiment.name in self._paused
        self._paused.discard(experiment.name)
        return was_paused and not done.stop and (experiment.kind == "run" or bool(done.exit_code))

    def _known(self, experiment: Experiment) -> Result | None:
        """The result of an earlier experiment with the same content; None: there is none.

        If DeepSpeed's engine had written its metrics before it was killed with us, the experiment counts as
        ended: the engine writes them once, at the end. Other scripts may write them again and again.
        """
        print_ = self._fingerprint(experiment)
        known = self._folders.load(experiment, print_)
        if known is None and self._setup.config.is_encoded:
            output = ExperimentOutput(self._folders.left(experiment, print_))
            left = judge(Done(experiment.name, 0, 0.0), output, self._keys(experiment))
            if left.outcome == "ok":
                known = left
                self._folders.save(experiment, print_, known)
        return known

    def _fingerprint(self, experiment: Experiment) -> str:
        setup = self._setup
        section = section_of(experiment.config, AUTOTUNING)
        words = setup.args_for(experiment.config, "")  # the config counts, not the place of its file
        return fingerprint(
            __version__,
            without_tuning(experiment.config),
            {key: section[key] for key in MEASURED if key in section},
            experiment.kind,
            experiment.repeat,
            [setup.program.script, setup.script_digest, *words],
            list(setup.trial_words),
            [setup.size.nodes, setup.size.slots_per_node, setup.device],
        )

    def _keys(self, experiment: Experiment) -> tuple[str, ...]:
        if experiment.kind == "profile":
            return ("num_params",)
        return metric_keys(self._setup.section)

    def _start(self, experiment: Experiment, place: SlotGroup) -> None:
        setup, folders = self._setup, self._folders
        folder = folders.folder(experiment)
        own = {
            **section_of(experiment.config, AUTOTUNING),
            PATH_KEYS[experiment.kind]: folders.written(experiment),
        }
        config = {**experiment.config, AUTOTUNING: own}
        config_path = f"{folder}/ds_config.json"
        options = [*setup.trial_words, *setup.start_words]
        if setup.request.output.each_rank_log is not None:
            options.append(f"--enable_each_rank_log={folder}/ranks")
        # An experiment that does not take everything has a port of its own.
        own_port = setup.user.only("master_port") if setup.is_whole else ()
        options += [*setup.place_words(place), *(own_port or ("--master_port=0",))]
        args = setup.args_for(config, config_path, is_encoded=setup.config.is_encoded)
        words = setup.words(options, args)
        exp = {
            "name": experiment.name,
            "ds_config": config,
            "num_gpus": setup.size.slots_per_node,
            "num_nodes": setup.size.nodes,
            "hostfile": "".join(setup.user.only("hostfile")).partition("=")[2],
            # From here to the base64 as DeepSpeed writes it; the port is chosen when the experiment starts.
            "exp_id": self._count,
            "result_dir": folder,
            "master_port": 0,
            "launcher_args": options,
            "user": setup.environ.get("USER", ""),
            "job_id": next(filter(None, map(setup.environ.get, JOB_IDS)), "unknown-job-id"),
            "ds_config_path": config_path,
            "ds_config_base64": encode(config),
            "place": as_filter(place),
            "kind": experiment.kind,
            "space": experiment.space,
            "repeat": experiment.repeat,
            "fingerprint": self._fingerprint(experiment),
        }
        self._count += 1
        folders.begin(experiment, exp, join(("dsl", *words)))
        self._places[experiment.name] = (experiment, place)
        self._progress.began(experiment)
        self._held.hold(setup.servers, ())
        self._runners.start(experiment.name, words, folder, setup.shown_to(place))

    def _judge(self, experiment: Experiment, done: Done) -> Result:
        folders = self._folders
        if done.error:
            raise AutotuningError(f"experiment {experiment.name} cannot be started: {done.error}")
        output = ExperimentOutput(
            written=folders.text(experiment),
            instead=folders.instead(experiment),
            stdout=folders.tail(experiment, "stdout"),
            stderr=folders.tail(experiment, "stderr"),
            judgement=folders.take_end(experiment),
        )
        result = judge(done, output, self._keys(experiment), self._setup.section.exp_timeout_s)
        if self.signals and result.outcome != "ok":
            # The signal may have reached the experiments, too: then the way in which they ended says nothing.
            result = replace(STOPPED, exit_code=result.exit_code, elapsed_s=result.elapsed_s)
        folders.save(experiment, self._fingerprint(experiment), result)
        return result
