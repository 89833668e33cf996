"""What a worker gets: the environment that it inherits, the variables about its job, its command.

The two families of launchers differ in these. They stand here as data, from the launcher of DeepSpeed 0.19.8
and the agent of torchrun (torch 2.15), whose answers are recorded in the contract tests. DeepSpeed sets no
NODE_RANK, but we do: Lightning reads NODE_RANK, and without it every node believes that it is the first.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.errors import NoDevicesError
from dsl.model.job import Flavour
from dsl.words import TASKS, THREADS_VARIABLE, shorten, signal_word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.facts import Facts
    from dsl.model.job import Job, Meeting
    from dsl.model.request import Program
    from dsl.words import TaskNames


ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Names the file where the process with this variable records its error."""

TIMER_SWITCH_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
"""Workers may take timers if this variable is 1."""

TIMER_FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
"""Names the FIFO of the timers."""

REASON_VARIABLE = "DSL_RESTART_REASON"
"""Tells the workers of a job whose nodes come and go why they were started: start, failure or membership."""

ATTEMPT_VARIABLE = "DSL_ATTEMPT"
"""Tells the same workers how often their node has started workers before."""

JOB_KEY_VARIABLE = "DSL_JOB_KEY"
"""Holds the key that the nodes of a job share; workers do not get it."""

GIVEN_DEVICES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""Slurm sets them where it has given devices of the node, and names these in the next variables, too."""

MASKS_OF_SLURM = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

POD_ENVIRONMENT_PATH = "/dlts-runtime/env/pod.env"
"""Where DLTS clusters describe a pod to its processes."""

POD_VARIABLES = ("FC_TASKROLE_NAME", "FC_TASK_INDEX")
"""Variables that we take from that file."""


def parse_pod_environment(text: str) -> dict[str, str]:
    """Read ``FC_TASKROLE_NAME`` and ``FC_TASK_INDEX`` from lines ``export NAME=VALUE``; skip other lines."""
    found = {}
    for line in text.splitlines():
        words = line.split(maxsplit=1)
        if len(words) == 2 and words[0] == "export":
            name, equals, value = words[1].partition("=")
            if equals and name in POD_VARIABLES:
                found[name] = value.strip().strip("\"'")
    return found


def pod_variables(job: Job, facts: Facts) -> dict[str, str]:
    """Variables by which the cluster describes this node's pod, if the flavour passes them to workers."""
    if not job.flavour.reads_pod:
        return {}
    try:
        text = facts.files.read_text(POD_ENVIRONMENT_PATH)
    except OSError:
        return {}
    return parse_pod_environment(text) if text else {}


def accelerator_of(job: Job, inherited: Mapping[str, str], facts: Facts) -> str:
    """The accelerator of this node: the job names it, or the node looks for its own."""
    if job.accelerator:
        return job.accelerator
    from dsl.devices.offered import select_accelerator

    return select_accelerator(inherited, facts.devices)[0]


def shown_slots(job: Job, slots: Sequence[int], inherited: Mapping[str, str], facts: Facts) -> dict[str, str]:
    """The visible-devices variable: the job's value, else devices that Slurm has given, else the slots.

    Raises:
        NoDevicesError: Slurm has given too few devices.
    """
    from dsl.devices import ACCELERATORS

    accelerator = accelerator_of(job, inherited, facts)
    variable = ACCELERATORS[accelerator].visible_variable
    shown = job.visible_devices
    if shown is None:
        numbers = [str(slot) for slot in slots]
        if variable in MASKS_OF_SLURM and any(name in inherited for name in GIVEN_DEVICES):
            numbers = _given_devices(
                numbers, variable, inherited, is_local=bool(job.accelerator), is_cpu=accelerator == "cpu"
            )
        shown = ",".join(numbers)
    return {variable: shown}


def _given_devices(
    numbers: list[str], variable: str, inherited: Mapping[str, str], *, is_local: bool, is_cpu: bool
) -> list[str]:
    """The devices for slots with these numbers, among those that Slurm has given to our step or job.

    Slots count the devices of Slurm's list. If the slots were found on this machine (``is_local``), they may
    be in the list themselves. Any other device may belong to another job.
    """
    mask = inherited.get(variable, "")
    numbered = next(inherited[name] for name in GIVEN_DEVICES if name in inherited)
    given = (mask or numbered).split(",")
    if all(number in given for number in numbers) and (is_local or not mask):
        return numbers
    if mask and max(map(int, numbers), default=0) < len(given):
        return [given[int(number)] for number in numbers]
    if is_cpu:
        return numbers
    where = f"{variable}={shorten(mask)}" if mask else f"{shorten(numbered)}, and {variable} is not set"
    raise NoDevicesError(
        f"Slurm has given {len(given)} GPU{'s' * (len(given) > 1)} here ({where}), too few for slots "
        f"{','.join(numbers)}: ask it for --gpus-per-node, let it bind none to a task, or choose fewer slots"
    )


def without_ranks(environ: Mapping[str, str], launchers: Sequence[TaskNames] = TASKS) -> Mapping[str, str]:
    """An environment without what launchers of tasks have told this process about its own rank."""
    gone: tuple[str, ...] = ()
    for rank, _, size, names in launchers:
        if rank in environ or size in environ:
            gone += names
    if not gone:
        return environ
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(gone) or name.startswith("PMIX_MCA_")
    }


def shared_ranks(environ: Mapping[str, str], meeting: Meeting, local_rank: int) -> dict[str, str]:
    """What the launchers of tasks have told the only worker of this process, if it is the same as we tell it.

    Slurm's number of tasks per node may be missing, or what was asked for; Lightning reads it.
    """
    found: dict[str, str] = {}
    own = (str(meeting.ranks[local_rank]), str(local_rank), str(meeting.world_size))
    for *variables, names in TASKS:
        if variables[0] not in environ:
            continue
        if all(environ.get(name, value) == value for name, value in zip(variables, own, strict=True)):
            found |= {name: value for name, value in environ.items() if name.startswith(names)}
    if "SLURM_NTASKS" in found:
        found["SLURM_NTASKS_PER_NODE"] = str(meeting.local_world_size)
    return found


def inherited_environment(job: Job, environ: Mapping[str, str]) -> Mapping[str, str]:
    """What the workers of a node inherit: the environment of its agent, overlaid with the job's variables.

    Neither the key by which nodes join the job nor the agent's own rank (see `shared_ranks`) is among it.
    """
    inherited = without_ranks(environ)
    if job.env:
        from dsl.resources.exports import fill_in

        inherited = fill_in(job.env, inherited)
    if JOB_KEY_VARIABLE in inherited:
        return {name: value for name, value in inherited.items() if name != JOB_KEY_VARIABLE}
    return inherited


def choose_timer_file(job: Job, facts: Facts) -> str | None:
    """Name the FIFO of the workers' timers; None if timers are not switched on."""
    environ = inherited_environment(job, facts.environ)
    if not job.flavour.has_timers or environ.get(TIMER_SWITCH_VARIABLE) != "1":
        return None
    asked = environ.get(TIMER_FILE_VARIABLE)
    return asked or f"{facts.names.temp_dir}/watchdog_timer_{facts.names.random()}"


def group_environment(job: Job, meeting: Meeting, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment that all workers of a node share, without the defaults (see `set_defaults`)."""
    facts = {
        "master_addr": meeting.address,
        "master_port": str(meeting.port),
        "world_size": str(meeting.world_size),
        "local_world_size": str(meeting.local_world_size),
        "node_rank": str(meeting.node_rank),
        "node_count": str(meeting.node_count),
        "restarts": str(meeting.restarts),
        "role_size": str(meeting.world_size if meeting.role_size is None else meeting.role_size),
        "max_restarts": str(job.max_restarts),
        "run_id": job.run_id,
        "role": job.role,
        "stop_signals": ",".join(map(signal_word, job.signals.stop or ())),
    }
    env = dict(inherited)
    env.update([(name, facts[fact]) for name, fact in job.flavour.group_variables])
    env.update(job.flavour.constants)
    if meeting.reason:
        env[REASON_VARIABLE] = meeting.reason
        env[ATTEMPT_VARIABLE] = str(meeting.attempt)
    return env


def set_defaults(env: dict[str, str], flavour: Flavour, local_world_size: int) -> None:
    """Add the flavour's default for each variable that is not set: the user and the bindings choose first."""
    crowd = flavour.crowd_defaults if local_world_size > 1 else ()
    for name, value in (*flavour.defaults, *crowd):
        env.setdefault(name, value)


def worker_environment(
    flavour: Flavour, meeting: Meeting, local_rank: int, error_file: str = ""
) -> dict[str, str]:
    """The variables that one worker has beside those of its node."""
    rank = meeting.ranks[local_rank]
    role_rank = rank if meeting.first_role_rank is None else meeting.first_role_rank + local_rank
    own = str(local_rank)  # equal numbers are one text: there may be thousands of workers
    facts = {
        "rank": own if rank == local_rank else str(rank),
        "role_rank": own if role_rank == local_rank else str(role_rank),
        "local_rank": own,
        "error_file": error_file,
    }
    return {name: facts[fact] for name, fact in flavour.worker_variables}


LOCAL_RANK_MACRO = "${local_rank}"

FLAGS = ("-u",)
"""Python's flags before every script and module, as with DeepSpeed and torchrun."""

CALL_FILE = "call.pickle"
"""File in the directory of a run: the function that was launched from Python, and its arguments."""

RESULT_FILE = "result.pickle"
"""File in the directory of a worker: what the function returned."""

WORKER_FILE = "worker.py"
"""File in the directory of a run: a copy of the workers' program, in case the package is gone."""


def worker_commands(
    program: Program, flavour: Flavour, environ: Mapping[str, str], executable: str, folders: Sequence[str]
) -> list[tuple[str, ...]]:
    """The command of each worker, by local rank.

    ``executable`` is the interpreter of this node, which a variable of ``environ`` may replace. ``folders``
    are the workers' own directories, ``RUN/attempt_N/LOCAL_RANK``: the command of a call names files there.
    """
    ranks = range(len(folders))
    if program.kind == "call":  # `dsl.functions.call` writes and reads these files
        run_dir = folders[0].rpartition("/")[0].rpartition("/")[0]
        words = (program.script, *program.args, f"{run_dir}/{CALL_FILE}")
        return [(*words, f"{folders[rank]}/{RESULT_FILE}", str(rank)) for rank in ranks]
    head: tuple[str, ...] = (program.script,)
    if program.kind != "program":
        interpreter = interpreter_of(flavour, environ, executable)
        script = f"./{program.script}" if program.script[:1] == "-" else program.script  # it is no option
        head = (interpreter, *FLAGS, *(("-m", program.script) if program.kind == "module" else (script,)))
    option = program.local_rank_option
    own = [(f"{option}={rank}",) if option else () for rank in ranks]
    words = (*head, *program.args)
    if flavour.fills_local_rank and any(LOCAL_RANK_MACRO in word for word in words):
        return [(*_filled(head, rank), *own[rank], *_filled(program.args, rank)) for rank in ranks]
    return [(*head, *one, *program.args) for one in own] if option else [words] * len(folders)


def words_of_interpreter(program: Program) -> int:
    """How many words at the start of a Python worker's command are the interpreter and its flags."""
    return len(program.args) if program.kind == "call" else 1 + len(FLAGS)


def interpreter_of(flavour: Flavour, environ: Mapping[str, str], executable: str) -> str:
    """The interpreter of Python workers: ``executable``, unless a variable of ``environ`` names another."""
    return environ.get(flavour.interpreter_variable) or executable


def _filled(words: Sequence[str], local_rank: int) -> list[str]:
    return [word.replace(LOCAL_RANK_MACRO, str(local_rank)) for word in words]


# What torch's agent tells its workers. DeepSpeed's elastic agent is torch's, too.
AGENT = (
    ("GROUP_RANK", "node_rank"),
    ("GROUP_WORLD_SIZE", "node_count"),
    ("LOCAL_WORLD_SIZE", "local_world_size"),
    ("ROLE_WORLD_SIZE", "role_size"),
    ("ROLE_NAME", "role"),
    ("TORCHELASTIC_RESTART_COUNT", "restarts"),
    ("TORCHELASTIC_MAX_RESTARTS", "max_restarts"),
    ("TORCHELASTIC_RUN_ID", "run_id"),
)
# Rank 0 serves the store: our launcher has no torch to serve one.
NO_STORE = (("TORCHELASTIC_USE_AGENT_STORE", "False"),)

DEEPSPEED = Flavour(
    command="dsl",
    group_variables=(
        ("MASTER_ADDR", "master_addr"),
        ("MASTER_PORT", "master_port"),
        ("WORLD_SIZE", "world_size"),
        ("LOCAL_SIZE", "local_world_size"),
        ("CROSS_RANK", "node_rank"),
        ("NODE_RANK", "node_rank"),
        ("CROSS_SIZE", "node_count"),
    ),
    worker_variables=(("RANK", "rank"), ("LOCAL_RANK", "local_rank")),
    shows_slots=True,
    reads_pod=True,
    logs_by_folder=True,
    binds_memory=True,
    tells_bindings=True,
    underscores=True,
)

# DeepSpeed's elastic agent is started with the environment of DeepSpeed's launcher.
ELASTIC = replace(
    DEEPSPEED,
    group_variables=(*DEEPSPEED.group_variables, *AGENT),
    worker_variables=(*DEEPSPEED.worker_variables, ("ROLE_RANK", "role_rank")),
    constants=NO_STORE,
    defaults=(("NCCL_ASYNC_ERROR_HANDLING", "1"),),
)

TORCH = Flavour(
    command="dslrun",
    group_variables=(
        *AGENT,
        ("WORLD_SIZE", "world_size"),
        ("TORCHELASTIC_SIGNALS_TO_HANDLE", "stop_signals"),
        ("MASTER_ADDR", "master_addr"),
        ("MASTER_PORT", "master_port"),
    ),
    worker_variables=(
        ("RANK", "rank"),
        ("ROLE_RANK", "role_rank"),
        ("LOCAL_RANK", "local_rank"),
        ("TORCHELASTIC_ERROR_FILE", "error_file"),
    ),
    constants=NO_STORE,
    defaults=(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),),
    crowd_defaults=((THREADS_VARIABLE, "1"),),
    interpreter_variable="PYTHON_EXEC",
    fills_local_rank=True,
    keeps_errors=True,
    hands_on_errors=True,
    has_timers=True,
    logs_by_folder=True,
)

# Called from Python, torch's launcher sets no number of threads, leaves error records to its caller, and
# writes log files only if stream maps ask for them.
FUNCTIONS = replace(TORCH, crowd_defaults=(), hands_on_errors=False, logs_by_folder=False)

FLAVOURS = {"deepspeed": DEEPSPEED, "torch": TORCH, "functions": FUNCTIONS}
"""Flavours by their names in `dsl.model.request.Request.flavour`."""
