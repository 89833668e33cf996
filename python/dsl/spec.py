"""`dsl.model.NodePlan` -> `dsl._core.LaunchSpec`: the only author of what the engine is told to start."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl._core import LaunchSpec
    from dsl.model import NodePlan


def launch_spec(plan: NodePlan, *, stdin_is_terminal: bool) -> LaunchSpec:
    """Translate a plan; nothing is decided but stdin.

    A worker that is alone on its node gets our stdin, and the terminal if that is one. Several workers
    would steal each other's input, so they get ``/dev/null``.

    Raises:
        SpecError: from the engine, for a plan that cannot be started.
    """
    from dsl._core import LaunchSpec, Stdio, WorkerSpec

    alone = len(plan.workers) == 1
    stdin = Stdio.inherit() if alone else Stdio.null()
    console = Stdio.inherit()
    workers = [
        WorkerSpec(
            worker.argv,
            env=worker.env,
            stdin=stdin,
            stdout=console if worker.log_path is None else Stdio.file(worker.log_path),
            stderr=console if worker.log_path is None else Stdio.stdout(),
            cpus=worker.cpus,
            mempolicy=worker.mempolicy,
            foreground=alone and stdin_is_terminal,
        )
        for worker in plan.workers
    ]
    return LaunchSpec(workers, env=plan.env, on_failure="stop", grace_s=plan.grace_s)
