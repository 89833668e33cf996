"""What reaches many hosts by ssh: ``python -m dsl.fanout``, which `dsl` starts on the launching host."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python puts the working directory there, whose files are the user's: none of them is a module of ours.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

    from dsl.cli.fanout import main

    sys.exit(main())
