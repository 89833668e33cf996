"""The words of a worker's command."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.model.job import Flavour
    from dsl.model.request import Program

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
    if program.kind == "call":
        words = (program.script, *program.args)
        return [(*words, *_call_files(folders[rank]), str(rank)) for rank in ranks]
    head: tuple[str, ...] = (program.script,)
    if program.kind != "program":
        interpreter = interpreter_of(flavour, environ, executable)
        head = (interpreter, *FLAGS, *(("-m",) if program.kind == "module" else ()), program.script)
    option = program.local_rank_option
    own = [(f"{option}={rank}",) if option else () for rank in ranks]
    words = (*head, *program.args)
    if flavour.fills_local_rank and any(LOCAL_RANK_MACRO in word for word in words):
        return [(*_filled(head, rank), *own[rank], *_filled(program.args, rank)) for rank in ranks]
    return [(*head, *own[rank], *program.args) for rank in ranks]


def words_of_interpreter(program: Program) -> int:
    """How many words at the start of a Python worker's command are the interpreter and its flags."""
    return len(program.args) if program.kind == "call" else 1 + len(FLAGS)


def interpreter_of(flavour: Flavour, environ: Mapping[str, str], executable: str) -> str:
    """The interpreter of Python workers: ``executable``, unless a variable of ``environ`` names another."""
    return environ.get(flavour.interpreter_variable) or executable


def _filled(words: Sequence[str], local_rank: int) -> list[str]:
    return [word.replace(LOCAL_RANK_MACRO, str(local_rank)) for word in words]


def _call_files(folder: str) -> tuple[str, str]:
    """Where a worker reads the call, and where it leaves the result; see `dsl.functions.call`."""
    run_dir = folder.rpartition("/")[0].rpartition("/")[0]
    return f"{run_dir}/{CALL_FILE}", f"{folder}/{RESULT_FILE}"
