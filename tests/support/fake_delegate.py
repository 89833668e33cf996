"""A delegate that passes all lines on to the test, and ends with either side: ``fake_delegate.py HUB FD``."""

from __future__ import annotations

import select
import socket
import sys


def main() -> None:
    """Pass on until somebody hangs up."""
    agent = socket.socket(fileno=int(sys.argv[2]))
    hub = socket.socket(socket.AF_UNIX)
    hub.connect(sys.argv[1])
    others = {agent: hub, hub: agent}
    poller = select.poll()
    for one in others:
        poller.register(one, select.POLLIN)
    by_fd = {one.fileno(): one for one in others}
    while True:
        for fd, _ in poller.poll():
            data = by_fd[fd].recv(1 << 16)
            if not data:
                return
            others[by_fd[fd]].sendall(data)


main()
