"""Chooses hosts and slots: ``--include``, ``--exclude``, ``--num_nodes``, ``--num_gpus``.

A filter is ``HOST[:SLOT[,SLOT...]]``, several joined by ``@``. A host without slots means all of its slots,
unless the same filter also names some of them. The result keeps the order of the resource pool, not the order
of the filter. It drops hosts that have no slot left.
"""

from __future__ import annotations

from dsl.errors import FilterError, NumNodesError
from dsl.lists import MOST_WORKERS, find_runs, first_few, parse_integer, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def parse_filter(text: str) -> dict[str, list[int]]:
    """``"a:1,0@b"`` -> ``{"a": [0, 1], "b": []}``; an empty list stands for the whole host.

    Raises:
        FilterError: a part that is not ``HOST[:SLOT[,SLOT...]]``.
    """
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.partition(":")
        chosen = named.setdefault(host, set())
        if not colon:
            continue
        for slot in slots.split(","):
            number = parse_integer(slot)
            if number is None:
                raise FilterError(
                    f"bad filter {quote(part)}, expected HOST or HOST:SLOT,SLOT with whole numbers as slots"
                )
            chosen.add(number)
    return {host: sorted(slots) for host, slots in named.items()}


def apply_filters(
    pool: Mapping[str, Sequence[int]], include: str, exclude: str, source: str = "hostfile"
) -> dict[str, list[int]]:
    """Return the active resources: host -> slots that pass the filter, in the order of the pool.

    Without a filter it returns the whole pool, with hosts that have no slots. ``source``: name of the pool in
    errors.

    Raises:
        FilterError: both filters at once, a malformed filter, or a host or slot that is not in the pool.
    """
    if include and exclude:
        raise FilterError("--include and --exclude are mutually exclusive, give one of them")
    if not include and not exclude:
        return {host: list(slots) for host, slots in pool.items()}
    named = parse_filter(include or exclude)
    for host, slots in named.items():
        check_slots(host, slots, pool, source)
    pick = _included if include else _excluded
    active = {host: pick(slots, named.get(host)) for host, slots in pool.items()}
    return {host: slots for host, slots in active.items() if slots}


def _included(slots: Sequence[int], named: Sequence[int] | None) -> list[int]:
    if named is None:
        return []
    return list(dict.fromkeys(named or slots))


def _excluded(slots: Sequence[int], named: Sequence[int] | None) -> list[int]:
    if named is not None and not named:
        return []
    dropped = set(named or ())
    return [slot for slot in dict.fromkeys(slots) if slot not in dropped]


def check_slots(
    host: str, slots: Iterable[int], pool: Mapping[str, Sequence[int]], source: str = "hostfile"
) -> None:
    """Raise FilterError unless the pool has the host and each of the slots."""
    if host not in pool:
        raise FilterError(f"hostname {quote(host)} not found in {source}{_nearest(host, list(pool))}")
    for slot in slots:
        if slot not in pool[host]:
            raise FilterError(
                f"no slot '{slot}' specified on host {host!r}, which has {slots_text(pool[host])}"
            )


def _nearest(host: str, hosts: Sequence[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(host, hosts, n=1)
    if close:
        return f", did you mean {close[0]!r}?"
    return f", known: {first_few(hosts)}"


def slots_text(slots: Sequence[int]) -> str:
    """Ascending slots in words: ``only slot 0``, ``slots 0 to 3``, ``slots 0, 2``."""
    if not slots:
        return "no slots"
    (first, last), *more = find_runs(slots)
    if not more:
        return f"only slot {first}" if first == last else f"slots {first} to {last}"
    return f"slots {first_few(slots, 16)}"


def parse_num_nodes(text: str, elastic_training: bool) -> tuple[int, int]:  # noqa: FBT001  DeepSpeed's signature
    """``"N"`` -> (N, -1); ``"MIN:MAX"`` of an elastic job -> (MIN, MAX).

    Raises:
        NumNodesError: MIN:MAX without elastic training, more than two parts, or a part that is no number.
    """
    counts = [parse_integer(part) for part in text.split(":")]
    least, most = counts[0], counts[-1]
    if least is None or most is None or len(counts) > 2:
        raise NumNodesError(f"num_nodes {quote(text)} is not in MIN:MAX format, nor a whole number")
    if len(counts) == 1:
        return least, -1
    if not elastic_training:
        raise NumNodesError(f"num_nodes {text!r}: MIN:MAX format is only supported in elastic training")
    return least, most


def trim(
    active: Mapping[str, Sequence[int]],
    num_nodes: int | None,
    num_gpus: int | None,
    *,
    checked: bool,
    source: str,
) -> dict[str, list[int]]:
    """Keep the first ``num_nodes`` hosts, each with its first ``num_gpus`` slots; None and 0 change nothing.

    ``checked``: False if slots are only a number, such as the slots that dsl counts for a CPU; then a host
    gets slots 0 to ``num_gpus`` - 1, even if it has fewer. ``source``: name of the hostfile in errors.

    Raises:
        FilterError: fewer hosts, or fewer slots on a host, than asked for.
    """
    hosts = list(active)
    if num_nodes is not None and num_nodes > len(hosts):
        raise FilterError(
            f"--num_nodes {num_nodes} is more than the hosts that {source} leaves: {len(hosts)}"
        )
    if num_nodes is not None and num_nodes > 0:
        hosts = hosts[:num_nodes]
    if num_gpus is not None and num_gpus > MOST_WORKERS:
        raise FilterError(f"--num_gpus {num_gpus} is too many: a host can have {MOST_WORKERS} at most")
    if num_gpus is None or num_gpus <= 0:
        return {host: list(active[host]) for host in hosts}
    for host in hosts:
        if checked and num_gpus > len(active[host]):
            raise FilterError(
                f"--num_gpus {num_gpus} is too many: host {host!r} has {slots_text(active[host])}"
            )
    return {host: list(active[host][:num_gpus]) if checked else list(range(num_gpus)) for host in hosts}
