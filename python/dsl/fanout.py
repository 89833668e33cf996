"""Runs the programs that reach the hosts of a job: ``python -m dsl.fanout``, see `dsl.agent.keeper`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python puts the working directory here. The user's files there must not replace our modules.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

    from dsl.agent.keeper import main

    sys.exit(main())
