"""Reaches many hosts by ssh: ``python -m dsl.fanout``, which `dsl` starts on the launching host."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python puts the working directory here. The user's files there must not replace our modules.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

    from dsl.cli.fanout import main

    sys.exit(main())
