"""Which hosts a proxy of the environment stands before. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PROXIES = ("http_proxy", "https_proxy", "all_proxy")
"""Variables that name a proxy, in small or capital letters."""


def unproxied(variables: Mapping[str, str], hosts: Sequence[str]) -> tuple[str, list[str]]:
    """The variable that names a proxy, and the hosts that ``no_proxy`` does not except from it."""
    both = [name for word in PROXIES for name in (word, word.upper())]
    name = next((one for one in both if variables.get(one)), "")
    if not name:
        return "", []
    text = variables.get("no_proxy") or variables.get("NO_PROXY") or ""
    exceptions = [word.strip() for word in text.split(",") if word.strip()]
    return name, [host for host in hosts if not any(_covers(one, host) for one in exceptions)]


def _covers(exception: str, host: str) -> bool:
    """An exception is ``*``, a name with all names below it, an address, or a network as ``10.0.0.0/8``."""
    if exception == "*":
        return True
    host = host.rpartition("@")[2].lower()
    name = exception.lower().removeprefix("*").lstrip(".").partition(":")[0]
    if host == name or host.endswith(f".{name}"):
        return True
    if "/" not in exception:
        return False
    from ipaddress import ip_address, ip_network

    try:
        return ip_address(host) in ip_network(exception, strict=False)
    except ValueError:
        return False
