"""The master port: where the store of rank 0 will listen.

Nobody wants port 29500 as such: it is used when it is free, and replaced when it is not. A port that was
asked for is used or refused, naming its holder.
"""

from __future__ import annotations

from dsl.errors import PortError
from dsl.model.request import DEFAULT_MASTER_PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.machine.ports import Ports


def choose_port(asked: int | None, *, shared: bool, ports: Ports, here: bool = True) -> tuple[int, bool]:
    """Return the master port, and whether it stands in for the default one because that is taken.

    ``asked`` is the user's (None: not said; 0: any free one). ``shared``: other nodes must arrive at the same
    port by themselves, so none can be chosen here. ``here``: rank 0 listens on this node; elsewhere the port
    may well be in use.

    Raises:
        PortError: not a port, taken, not permitted, or to be chosen though it is shared.
    """
    if asked is not None and not 0 <= asked <= 65535:
        raise PortError(f"--master_port {asked} is not a port, expected 1 to 65535, or 0 for any free one")
    if asked == 0 and shared:
        raise PortError("--master_port 0: a job on several nodes needs the same port on each, name one")
    if asked == 0:
        return ports.pick(), False
    port = DEFAULT_MASTER_PORT if asked is None else asked
    if not here or ports.is_free(port):
        return port, False
    if asked is None and not shared:
        return ports.pick(), True
    advice = "choose another with --master_port" if shared else "choose another, or leave out --master_port"
    raise PortError(f"master port {port} is taken by {ports.holder(port)}; {advice}")
