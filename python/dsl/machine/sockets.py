"""The sockets of this user's jobs and warm servers: where they lie, which there are, and how they go."""

from __future__ import annotations

import os

from dsl._core import peer_pid
from dsl.machine.this_process import socket_folders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

MARK = "warm:"
"""Begins the last word of a warm server: descriptors of its socket, and maybe of a call and its request."""

NEW, READY = ".new", ".warm"
"""Ends of the names of sockets: of a warm server that imports, and of one that takes calls at once."""

MOST_SOCKETS = 1000
"""How many are asked."""
MOST_AT_ONCE = 32


def find_sockets(*endings: str) -> list[tuple[str, str]]:
    """Directory and name of each socket whose name ends so. Directories of other users do not count."""
    found = []
    for folder in socket_folders():
        try:
            names = os.listdir(folder) if os.lstat(folder).st_uid == os.geteuid() else []
        except OSError:
            continue
        found += [(folder, name) for name in sorted(names) if name.endswith(endings)]
    return found


def ask_sockets(ask: Callable[[tuple[str, str]], T | None], *endings: str) -> list[T]:
    """The answers from the sockets. All are asked at once: a stopped process holds up no other answer."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        return [one for one in pool.map(ask, find_sockets(*endings)[:MOST_SOCKETS]) if one is not None]


def peer_of(fd: int) -> int:
    """Pid of the process at the other end of a socket. Ask before you send anything or believe an answer.

    Raises:
        PermissionError: it is not one of this user here; the text goes on after "its process".
        OSError: it has ended.
    """
    return peer_pid(fd)


def left_alone(folder: str, name: str, why: object) -> str:
    """A line about a socket whose process is not one of this user here; ``why``: what it is, as a clause."""
    return f"warning: {os.path.join(folder, name)} is left alone: its process {why}, look from where it runs"


def remove_socket(folder: str, name: str) -> None:
    """Remove a socket at which nobody listens any more, and its directory if it was the last one there."""
    try:
        os.unlink(os.path.join(folder, name))
        os.rmdir(folder)  # fails while other sockets are there
    except OSError:
        return


def remove_sockets_of(pid: int) -> None:
    """Remove what the job of a command that had this pid has left."""
    for folder, name in find_sockets(".sock"):
        if name.startswith(f"{pid}-"):
            remove_socket(folder, name)
