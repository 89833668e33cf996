"""``dsl --autotuning``: finds the config with which the job runs best, and trains with it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from shlex import join

from dsl import _own_process
from dsl._record import replace
from dsl.agent.background import become
from dsl.agent.held_servers import HeldServers
from dsl.agent.planner import Planner
from dsl.agent.session import die_of_interrupt
from dsl.devices.accelerators import ACCELERATORS
from dsl.errors import AutotuningError, FilterError
from dsl.facts import Facts, this_machine
from dsl.lists import shorten
from dsl.machine.check import check_program
from dsl.model.job import Notice
from dsl.model.node import ForkServer
from dsl.model.request import LEVELS, ElasticRequest, Request
from dsl.plan.hosts import ActiveHosts, choose_hosts
from dsl.plan.job import JobPlan, plan_job
from dsl.report.speak import say
from dsl.tune.ds_config import (
    experiment_words,
    find_config,
    fingerprint,
    parse_config,
    resolve_auto,
    without_tuning,
)
from dsl.tune.experiment import GRACE_S, Experiment, Resources, Summary
from dsl.tune.progress_bar import Progress
from dsl.tune.results import Steps
from dsl.tune.search import count_configs, search
from dsl.tune.section import find_slips, read_section
from dsl.tune.setup import REPLACED, START_DSL, Setup, UserWords, count_lanes, digest_of, dsl_words
from dsl.tune.trials import Runners
from dsl.tune.tuner import Tuner
from dsl.tune.tuning_folders import OPTIMAL_COMMAND, OPTIMAL_CONFIG, Folders

COMMAND = "dsl"
WARM = ("--start-method=warm", "--warm-for=0")


def tune(request: Request, user: UserWords, *, trains: bool) -> int:
    """Find the best config, write it to a file, and train with it if ``trains``.

    ``user`` has the words of the commands. Returns the exit code: 0 if there is a best config, 1 if not,
    128 + the signal that ended the tuning. If it trains, this process becomes the training.

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
    setup, config, notices = set_up(request, user, facts)
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
        words = save_optimal(setup, summary.best, folders)
        folders.mark(is_finished=not signals)
        progress.finish(summary)
    finally:
        progress.pause()
        folders.close()
    if signals:
        again = join((COMMAND, *user.without(), *dsl_words((), setup.script, setup.args)))
        say(
            COMMAND,
            f"stopped; {folders.results_dir} has what is known, and the same command goes on: {again}",
        )
        if signals[0] == signal.SIGINT:
            die_of_interrupt()
        return 128 + signals[0]
    if not words:
        why = f"no experiment ran well, see {folders.results_dir}"
        say(COMMAND, f"error: {why}; the same command tries them again")
        return 1
    optimal = f"{folders.results_dir}/{OPTIMAL_CONFIG}"
    if trains:
        tell(Notice("info", f"training with {optimal}"))
        become((sys.executable, "-c", START_DSL, *words))
    tell(Notice("info", f"best config: {optimal}, the command is in {OPTIMAL_COMMAND} there"))
    return 0


def set_up(
    request: Request, user: UserWords, facts: Facts
) -> tuple[Setup, dict[str, object], tuple[Notice, ...]]:
    """What all experiments have in common, the config to tune, and notices for the user.

    Raises:
        UsageError: the job or its config cannot be tuned.
    """
    args = request.program.args
    word = find_config(args)
    try:
        text = facts.files.read_text(word.path)
    except OSError as error:
        raise AutotuningError(f"{shorten(word.path)}: the config cannot be read: {error.strerror}") from None
    if text is None:
        raise AutotuningError(
            f"{shorten(word.path)}: there is no such config, {word.option} names it: give the path of a file"
        )
    config = parse_config(text, word.path)
    section = read_section(config)
    config = resolve_auto(config, section, args)
    planned = plan_job(request, facts)  # finds mistakes in the job itself before any experiment runs
    check_program(planned.job.program, planned.job.flavour, facts.environ)
    asked = choose_hosts(request, facts)
    nodes, slots = len(asked.hosts), min([len(host.slots) for host in asked.hosts])
    whole = _all_hosts(request, facts)
    if count_lanes(whole.hosts, nodes, slots) == 0:
        whole = asked  # a CPU may have more workers than it counts slots
    lanes = count_lanes(whole.hosts, nodes, slots)
    is_here = planned.remote is None and not whole.is_remote
    servers = _servers(request, planned, facts) if is_here else ()
    setup = Setup(
        user=user,
        grace_s=min(request.signals.grace_s, GRACE_S),
        rank_logs=request.output.each_rank_log is not None,
        script=request.program.script,
        args=args,
        config=word,
        section=section,
        size=Resources(
            nodes,
            slots,
            lanes,
            # With one lane an experiment runs on the same hosts and slots as the user's own job.
            device_memory(asked if lanes == 1 else whole, lanes * slots, section.device_memory, facts),
        ),
        hosts=whole.hosts,
        is_uniform=all(len(host.slots) == slots for host in asked.hosts),
        servers=servers,
        # The user's own words say how long such a server stays.
        start_words=WARM if servers and request.start.method != "warm" else (),
        environ=dict(facts.environ),
        visible=_shown(whole),
        script_digest=digest_of(request.program.script),
        device=name_devices(whole, facts),
    )
    return setup, config, (*planned.notices, *find_slips(config))


def _servers(request: Request, planned: JobPlan, facts: Facts) -> tuple[ForkServer, ...]:
    """Warm fork servers that all experiments can share; none if the workers are not forked anyway."""
    plan = Planner(planned, facts).plan(0)
    if plan.fork_servers and request.start.method != "warm":
        start = replace(request.start, method="warm", warm_for_s=0.0)
        plan = Planner(plan_job(replace(request, start=start), facts), facts).plan(0)
    return tuple([one for one in plan.fork_servers if one.warm is not None])


def _all_hosts(request: Request, facts: Facts) -> ActiveHosts:
    """All hosts and slots that are available, independent of the size of the job."""
    resources = replace(request.resources, min_nodes=None, max_nodes=None, num_gpus=None)
    try:
        return choose_hosts(replace(request, resources=resources), facts)
    except FilterError:
        return choose_hosts(request, facts)


def _shown(hosts: ActiveHosts) -> tuple[str, tuple[str, ...]]:
    """The variable for visible devices, and the user's names in it; empty if the slots name the devices."""
    if not hosts.visible_devices or hosts.accelerator == "cpu":
        return "", ()
    return ACCELERATORS[hosts.accelerator].visible_variable, tuple(hosts.visible_devices.split(","))


def name_devices(hosts: ActiveHosts, facts: Facts) -> str:
    """The accelerator, and for CUDA also the models of this machine's devices."""
    if hosts.accelerator != "cuda":
        return hosts.accelerator
    return ", ".join(["cuda", *sorted({device.model for device in facts.devices.survey.devices})])


def device_memory(hosts: ActiveHosts, count: int, given: int | None, facts: Facts) -> int | None:
    """Free bytes of the experiments' device that has the least free memory; None if unknown.

    Experiments get the first ``count`` slots. A device that does not report its free memory counts in full.
    ``given``: the size that the user has set.
    """
    if given is not None:
        return given
    if hosts.is_remote or hosts.accelerator != "cuda":
        return None
    from dsl.devices.nvidia import visible_devices

    slots = ",".join(map(str, hosts.hosts[0].slots))
    found = visible_devices(hosts.visible_devices or slots, facts.devices.survey.devices)[:count]
    # A device that is divided into instances reports its free memory as a whole, not for each instance.
    sizes = [one.memory_bytes if one.mig or one.free_bytes is None else one.free_bytes for one in found]
    return min([size for size in sizes if size is not None], default=None)


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
        [setup.script, setup.script_digest, *setup.args],
        list(setup.trial_words),
        [size.nodes, size.slots_per_node, size.lanes, setup.device, setup.visible],
    )
    return replace(setup, size=replace(size, memory_bytes=folders.keep_memory(tuning, size.memory_bytes)))


def run_search(
    steps: Steps[Summary], batch: Sequence[Experiment], setup: Setup, folders: Folders, progress: Progress
) -> tuple[Summary, list[int]]:
    """The result of the search, and the signals that have ended it."""
    runners, held = Runners(), HeldServers()
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
    word = replace(setup.config, is_encoded=False)
    args = experiment_words(setup.args, word, config, path, setup.section)
    words = dsl_words((*setup.user.without(*REPLACED), *setup.own_words()), setup.script, args)
    folders.save_optimal(config, join((COMMAND, *words)))
    return words
