"""A fork server without Python's part: a forked child becomes the program that its order names, or runs a script.

argv[1] says what it does: ``serve``; ``refuse``; ``never`` gets ready; ``exit`` at once, or after a ``flood`` of words; ``helper``: serve, with a child
of its own; ``hang-up`` and live on; ``barren``: say that no order can be forked; ``mute``: forked children never enter.
``WHAT@STEP``: ``die``, ``freeze`` or ``sleep`` in the middle of the third order, and serve then: before the ``fork``,
before the ``answer``, ``after`` it; or before it is ``ready``. The last word is the descriptor.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from dsl import _core

FLOOD_MIB = 64
STRIKES = {
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda: time.sleep(600),
}


def strike(mode: str, step: str) -> None:
    """Do what the mode says for this step."""
    what, _, when = mode.partition("@")
    if when == step:
        STRIKES[what]()


def become(order: _core.ForkOrder) -> None:
    """Run what the order names: a script in this process, any other program in its place."""
    words = order.argv[order.entry :]
    if not words[0].endswith(b".py"):
        os.execve(words[0], words, dict(entry.partition(b"=")[::2] for entry in order.environ))
    order.show_command(len(sys.orig_argv))
    with open(words[0], encoding="utf-8") as file:
        code = compile(file.read(), os.fsdecode(words[0]), "exec")
    sys.argv = [os.fsdecode(word) for word in words]
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as error:
        sys.stdout.flush()
        os._exit(error.code if isinstance(error.code, int) else 0)
    os._exit(0)


def serve(link: _core.ForkLink, mode: str) -> None:
    """Fork a worker for each order."""
    count = 0
    while (order := link.next()) is not None:
        count += 1
        if mode == "barren":
            link.not_forked(order, 11)
            continue
        third = mode if count == 3 else ""
        strike(third, "fork")
        pid = os.fork()
        if pid == 0:
            if mode == "mute":
                os._exit(3)
            order.enter()
            become(order)
        strike(third, "answer")
        link.forked(order, pid)
        strike(third, "after")


def main() -> None:
    """See the module."""
    mode, fd = sys.argv[1], int(sys.argv[-1])
    link = _core.ForkLink(fd)
    if mode == "refuse":
        link.refuse("it is poisoned\nby a thread")
    elif mode in ("exit", "flood"):
        for _ in range(FLOOD_MIB if mode == "flood" else 0):
            os.write(1, b"x" * (1 << 20))
        print("what was printed\nSomeError: no such module", file=sys.stderr, flush=True)
        os._exit(3)
    elif mode == "never":
        time.sleep(600)
    elif mode == "hang-up":
        os.close(fd)
        time.sleep(600)
    else:
        if mode == "helper" and os.fork() == 0:
            os.setsid()
            os.execv("/bin/sleep", ["sleep", "600"])
        strike(mode, "ready")
        link.ready()
        serve(link, mode)
    os._exit(0)


main()
