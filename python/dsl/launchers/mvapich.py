"""``--launcher mvapich``: the mpirun of MVAPICH2, a Hydra too, with DeepSpeed's settings for its library."""

from __future__ import annotations

from dsl.launchers.base import Start
from dsl.launchers.hydra import ranks, transport
from dsl.launchers.words import HOST_FILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.launchers.base import Agents
    from dsl.model.remote import Remote

SETTINGS = (
    ("MV2_SMP_USE_CMA", "0"),
    ("MV2_DEBUG_SHOW_BACKTRACE", "1"),
    ("MV2_SUPPORT_DL", "1"),
    ("MV2_ENABLE_AFFINITY", "0"),
    ("MV2_INTER_ALLGATHER_TUNING", "5"),
    ("MV2_CUDA_USE_NAIVE", "0"),
)
"""DeepSpeed's settings for MVAPICH2: among others, use no kernel module, allow threads, do not bind."""

CUDA_SETTING = ("MV2_USE_CUDA", "1")


def mvapich(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The command that starts a task for each slot, or for each host. The user's own settings are kept.

    Raises:
        HostNameError: Hydra cannot be given the name of a host.
    """
    tasks = ranks(remote, agents)
    path = f"{agents.folder}/{HOST_FILE}"
    text = "".join(f"{line}\n" for line in (tasks.names if tasks.each else tasks.places))
    each = ("-ppn", tasks.each) if tasks.each else ()
    made = dict(agents.environ)
    settings = [*SETTINGS, *([CUDA_SETTING] if agents.is_cuda else [])]
    words = [word for name, value in settings if name not in made for word in ("-env", f"{name}={value}")]
    argv = ("mpirun", "-np", tasks.total, *each, "--hostfile", path, *remote.args, *words, *tasks.command)
    env = transport(remote, agents, "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXTRA_ARGS")
    return (Start(argv=argv, env=env, files=((path, text),)),)
