"""The agent on one host of a multi-host job: ``python -m dsl.node``, which `dsl` starts on that host."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python puts the working directory here. The user's files there must not replace our modules.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

    from dsl import _own_process

    _own_process.claim()  # before anything else is imported

    from dsl.agent.node import main

    sys.exit(main())
