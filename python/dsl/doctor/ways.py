"""Tries the ways between hosts: a port that answers connections, and connections to such ports.

Each side sends enough for many packets of full size, so a network that loses large ones shows. A caller gets
some bytes without a meaning.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread

from dsl.machine.crowd import close, serve
from dsl.model.health import Answer, Target, Way

BULK = 64 * 1024
"""Bytes that each side sends."""
TRY_S = 2.0
"""All ways of a host are tried at once, for so long."""
CALL_S = 5.0
"""A caller gets so long."""
MOST_ADDRESSES = 2
"""Addresses of a host that are tried."""
WITH_TOKEN = 3
"""Answers that a call has had when the host has said its token."""


class Porch:
    """A port that says the token to all who connect, and takes and sends bulk. A context manager.

    A thread serves it: the process beside it waits for its head.
    """

    def __init__(self, ports: Sequence[int]) -> None:
        """``ports``: those to try, in this order; 0: any free one."""
        self.token = os.urandom(8).hex()
        """What it says."""
        self.port = 0
        """Where it listens; 0: it could not."""
        self._is_over = Event()
        self._socket: socket.socket | None = None
        for port in ports:
            with suppress(OSError):
                self._socket = _listen(port)
                self.port = self._socket.getsockname()[1]
                break

    def __enter__(self) -> Porch:  # noqa: PYI034  typing has no Self before 3.11
        if self._socket is not None:
            Thread(target=self._serve, args=(self._socket,), daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._socket is not None:
            close(self._socket, self._is_over)

    def _serve(self, door: socket.socket) -> None:
        greeting = self.token.encode()
        serve(door, self._is_over, _answer, within_s=CALL_S, most_bytes=BULK, greeting=greeting)


def _answer(asked: bytearray) -> bytes | None:
    return bytes(BULK) if len(asked) >= BULK else None


def _listen(port: int) -> socket.socket:
    """A listening socket for IPv4 and, if there is IPv6, for that, too. Raises OSError."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=256)
    return socket.create_server(("", port), backlog=256)


def try_ways(targets: Sequence[Target], within_s: float = TRY_S) -> tuple[Way, ...]:
    """Try the ways to some hosts, all at once; the best answer of a host's addresses counts."""

    async def try_host(target: Target) -> list[Way]:
        tries = [_try(target, address, within_s) for address in target.addresses[:MOST_ADDRESSES]]
        return sorted(await asyncio.gather(*tries), key=lambda way: RANK.index(way.answer))[:1]

    async def try_all() -> list[list[Way]]:
        return await asyncio.gather(*map(try_host, targets))

    return tuple([way for ways in asyncio.run(try_all()) for way in ways])


async def _try(target: Target, address: str, within_s: float) -> Way:
    """Try the way to one address."""
    answers: list[Answer] = ["silent"]
    why = ""
    try:
        await asyncio.wait_for(_talk(target, address, answers), within_s)
    except (asyncio.TimeoutError, TimeoutError):
        pass  # the last answer holds
    except ConnectionRefusedError:
        answers.append("refuses")
    except ConnectionResetError as error:
        if len(answers) < WITH_TOKEN:
            why = _reason(error)
            answers.append("unreachable")
    except (OSError, UnicodeError) as error:
        why = _reason(error)
        answers.append("unreachable")
    return Way(target.place, address, answers[-1], why)


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the name has no address"
    return os.strerror(getattr(error, "errno", None) or errno.EINVAL).lower()


async def _talk(target: Target, address: str, answers: list[Answer]) -> None:
    """Send and take bulk; each step adds what the answer is if nothing follows. Raises OSError."""
    loop = asyncio.get_running_loop()
    family, kind, protocol, _, place = (
        await loop.getaddrinfo(address, target.port, type=socket.SOCK_STREAM)
    )[0]
    with socket.socket(family, kind, protocol) as caller:
        caller.setblocking(False)
        await loop.sock_connect(caller, place)
        reader, writer = await asyncio.open_connection(sock=caller.dup())  # closed with the writer
    try:
        answers.append("small")
        writer.write(bytes(BULK))
        said = await reader.readexactly(len(target.token))
        answers.append("stranger")
        if said == target.token.encode():
            answers.append("small")
            await reader.readexactly(BULK)
            answers.append("")
    except asyncio.IncompleteReadError:
        answers.append("stranger")
    finally:
        writer.close()


RANK: tuple[Answer, ...] = ("", "listens", "small", "refuses", "stranger", "silent", "unreachable")
"""Answers, the best first."""


def knock(addresses: Sequence[str], port: int, within_s: float = TRY_S) -> Answer:
    """What answers at a port of a host. We send nothing."""
    answers: list[Answer] = []
    for address in addresses[:MOST_ADDRESSES]:
        try:
            with socket.create_connection((address, port), within_s):
                answers.append("listens")
        except ConnectionRefusedError:
            answers.append("refuses")
        except TimeoutError:
            answers.append("silent")
        except OSError:
            answers.append("unreachable")
    return min(answers, key=RANK.index, default="unreachable")
