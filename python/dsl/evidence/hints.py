"""What mends a failure whose cause is known, one line each. Imported only when a worker has failed."""

from __future__ import annotations

import os

from dsl._record import Record
from dsl.machine.cgroups import room_left
from dsl.machine.kernel_files import shared_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.node import NodePlan, WorkerPlan

SIGBUS = 7
SHM_WORDS = ("out of shared memory", "insufficient shared memory", "creating shared memory", "file </torch_")
"""What torch and NCCL say if /dev/shm is full."""
OPTIONS = {"--local-rank": "dash", "--local_rank": "underscore"}
"""How a script may be told its local rank, with the word of ``--local-rank-arg``."""


class Death(Record):
    """What is known about a worker that failed. ``lines``: those of its last output that tell most."""

    plan: NodePlan
    worker: WorkerPlan
    signum: int | None = None
    is_out_of_memory: bool = False
    lines: tuple[str, ...] = ()


def hints(death: Death) -> tuple[str, ...]:
    """What to do about it, for each cause that it has."""
    return tuple([text for row in ROWS if (text := row(death))])


def _memory(death: Death) -> str:
    limit = room_left().memory_limit if death.is_out_of_memory else ""
    mend = "raise it (docker run --memory, sbatch --mem, the limits of a pod), or start fewer workers"
    return f"{limit} limits the memory of this job: {mend}" if limit else ""


def _shared_memory(death: Death) -> str:
    is_full = death.signum == SIGBUS or any(word in line for word in SHM_WORDS for line in death.lines)
    size, free = shared_memory() if is_full else (0, 0)
    room = f"it has {size >> 20} MB, {size - free >> 20} MB are in use now"
    mend = "start the container with --shm-size=8g, in Kubernetes mount an emptyDir with medium: Memory there"
    return f"a full /dev/shm is the usual reason: {room}; {mend}" if size else ""


def _input(death: Death) -> str:
    """Of a debugger or a prompt without input, if another worker of its node has that of the command."""
    worker, lines, workers = death.worker, death.lines, death.plan.workers
    has_quit = any("bdb.BdbQuit" in line or "Quitting pdb will kill the process" in line for line in lines)
    is_prompt = "EOFError" in "".join(lines[-1:]) and any("input(" in line for line in lines[-4:])
    if worker.stdin or not (has_quit or is_prompt) or not any(one.stdin for one in workers):
        return ""
    mend = f"--stdin {worker.rank} gives it the standard input of {death.plan.command}"
    return f"{worker.label.noun} {worker.label.name} has nothing to read: {mend}"


def _environment(death: Death) -> str:
    """Not if a link leads to another interpreter: so it is in every virtual environment."""
    env = {**death.plan.env, **death.worker.env}
    active = [(name, env[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name)]
    python = next(iter(death.worker.argv), "")
    folders = [os.path.realpath(os.path.join(path, "bin")) for _, path in active]
    lacks = any(line.startswith("ModuleNotFoundError: No module named ") for line in death.lines)
    is_there = os.path.realpath(os.path.dirname(python)) in folders
    if is_there or not (lacks and active and "python" in os.path.basename(python)):
        return ""
    name, path = active[0]
    other = f", or set PYTHON_EXEC={path}/bin/python" if death.plan.command == "dslrun" else ""
    return f"{name} is {path}, but the workers run {python}: install dsl there{other}"


def _local_rank(death: Death) -> str:
    """Of the option that we give to the script, or that it misses."""
    line = next((line for line in reversed(death.lines) if ": error: " in line), "")
    command, (dash, underscore) = death.plan.command, OPTIONS
    for mine, other in ((dash, underscore), (underscore, dash)):
        is_told = any(word.startswith(f"{mine}=") for word in death.worker.argv)
        if is_told and f"unrecognized arguments: {mine}=" in line:
            if command == "dsl":
                return "--no_local_rank leaves out the option, for scripts that read LOCAL_RANK"
            return f"--local-rank-arg {OPTIONS[other]} passes {other}=N, and --use-env leaves out the option"
        if command == "dslrun" and "arguments are required: " in line and mine in line:
            return f"--local-rank-arg {OPTIONS[mine]} passes {mine}=N"
    return ""


ROWS = (_memory, _shared_memory, _input, _environment, _local_rank)
