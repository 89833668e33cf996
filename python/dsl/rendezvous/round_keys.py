"""What the nodes of a round of torch's rendezvous tell each other: roles, ranks, master, facts of our own.

The keys and their contents are those of torch's agent (`torch.distributed.elastic.agent.server.api`), so that
nodes under torchrun can be in the same round. What only our nodes know is under keys of our own. We write
these keys before the keys that torch's protocol waits for, so no node has to wait for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from dsl._record import Record
from dsl.errors import RendezvousError
from dsl.lists import LAST_PORT, MOST_WORKERS, parse_number
from dsl.model.job import RestartReason
from dsl.model.request import Count, Shown
from dsl.rendezvous.store_messages import has_keys, read_record, write_record

FACTS = "dsl/facts/"
MASTER = ("MASTER_ADDR", "MASTER_PORT")
ROLE_INFO = "torchelastic/role_info"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
EXIT_BARRIER = "torchelastic/agent/terminal_state"


class Round(Record):
    """A complete round, as this node finds it."""

    store: Any
    """torch's store of the round."""
    rank: int
    """Place of this node."""
    node_count: int
    """Number of nodes."""
    is_assigned: bool = True
    """Group rank 0 assigns the ranks, as in torch since 2.4. Before, each node found its own."""


class NodeFacts(Record):
    """What a node of ours tells the others about itself."""

    host: Shown
    """The node's name for users."""
    restarts: Count
    """Counted restarts that it knows of."""
    reason: RestartReason
    """Why it joins."""
    node: str
    """Tells the node from all others: hosts may share a name."""


def tell_facts(round_: Round, facts: NodeFacts) -> None:
    """Write our facts. Call it before `tell_role`."""
    write_record(round_.store, f"{FACTS}{round_.rank}", facts)


def read_facts(round_: Round) -> tuple[NodeFacts | None, ...]:
    """The facts of all nodes, None for nodes that are not ours. Call it after `read_roles`."""
    store, kinds = round_.store, {"NodeFacts": NodeFacts}
    keys = [f"{FACTS}{rank}" for rank in range(round_.node_count)]
    return tuple([read_record(store, key, kinds) if has_keys(store, [key]) else None for key in keys])


def agree(facts: Sequence[NodeFacts | None], most: int | None) -> tuple[int, RestartReason]:
    """Restarts and reason, the same on all our nodes: the most restarts, and a failure before other reasons.

    ``most``: upper bound of the restarts, even if a node says more (None: no bound is known).
    """
    ours = [one for one in facts if one is not None]
    reasons = {one.reason for one in ours}
    reason: RestartReason = (
        "failure" if "failure" in reasons else "start" if reasons <= {"start"} else "membership"
    )
    restarts = max([one.restarts for one in ours], default=0)
    return restarts if most is None else min(restarts, most), reason


def role_key(round_: Round, rank: int) -> str:
    """The key under which a node tells its role."""
    return f"{ROLE_INFO}/{rank}" if round_.is_assigned else f"{ROLE_INFO}{rank}"


def tell_role(round_: Round, role: str, local_world_size: int) -> None:
    """Tell what this node starts."""
    mine = {"role": role, "rank": round_.rank, "local_world_size": local_world_size}
    round_.store.set(role_key(round_, round_.rank), json.dumps(mine))


def read_roles(round_: Round, wait: Callable[[list[str]], None]) -> tuple[tuple[int, ...], int, int]:
    """Learn what all nodes start, and assign the ranks if this node leads. Call it after `tell_role`.

    Returns the numbers of workers by node rank, and for the role of this node the first rank of its workers
    and the number of all workers.

    ``wait`` returns when all given keys are in the store of the round, and raises if they cannot come.
    """
    store, count = round_.store, round_.node_count
    keys = [role_key(round_, rank) for rank in range(count)]
    is_leader = round_.is_assigned and round_.rank == 0
    wait(keys if is_leader or not round_.is_assigned else [f"{ASSIGNED_RANKS}{round_.rank}"])
    infos = [json.loads(store.get(key)) for key in keys]
    sizes = [int(info["local_world_size"]) for info in infos]
    for rank, size in enumerate(sizes):
        if not 0 < size <= MOST_WORKERS:
            raise RendezvousError(f"node {rank} says that it starts {size} workers")
    roles = [str(info["role"]) for info in infos]
    if is_leader:
        for rank in range(count):
            store.set(f"{ASSIGNED_RANKS}{rank}", json.dumps(_assignment(rank, roles, sizes)))
    elif not round_.is_assigned:
        store.set(f"{keys[round_.rank]}.FIN", "FIN")  # torch's rank 0 waits for this key
    _, _, first, size = _assignment(round_.rank, roles, sizes)
    return tuple(sizes), first, size


def _assignment(rank: int, roles: Sequence[str], sizes: Sequence[int]) -> list[int]:
    """First global rank, world size, first rank of the role, size of the role, as torch writes them."""
    same = [size if role == roles[rank] else 0 for role, size in zip(roles, sizes, strict=True)]
    return [sum(sizes[:rank]), sum(sizes), sum(same[:rank]), sum(same)]


def tell_master(round_: Round, address: str, port: int) -> None:
    """Write where rank 0 will listen. Only group rank 0 calls it, before `tell_role`."""
    for key, value in zip(MASTER, (address, str(port)), strict=True):
        round_.store.set(key, value.encode())


def read_master(store: Any) -> tuple[str, int] | None:
    """Where rank 0 will listen, if the store of a round has it."""
    if not has_keys(store, [MASTER[1]]) or not has_keys(store, [MASTER[0]]):
        return None
    port = parse_number(store.get(MASTER[1]).decode())
    if port is None or not 0 < port <= LAST_PORT:
        raise RendezvousError("the store names no port for rank 0, another program may have written there")
    return store.get(MASTER[0]).decode(), port


def arrive_at_exit(round_: Round) -> bool:
    """Say that all workers of this node have ended well. Returns whether this node is surely the last."""
    store = round_.store
    if not round_.is_assigned:
        store.set(f"{EXIT_BARRIER}{round_.rank}", str(round_.rank))
        store.set(f"{EXIT_BARRIER}{round_.rank}.FIN", "FIN")
        return False
    is_last = int(store.add(f"{EXIT_BARRIER}/num_members", 1)) == round_.node_count
    if is_last:
        store.set(f"{EXIT_BARRIER}/last_member", "<val_ignored>")
    return is_last


def exit_keys(round_: Round) -> list[str]:
    """Keys that are in the store of the round once all nodes have arrived at the exit."""
    if round_.is_assigned:
        return [f"{EXIT_BARRIER}/last_member"]
    return [f"{EXIT_BARRIER}{rank}" for rank in range(round_.node_count)]
