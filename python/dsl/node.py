"""The agent on one host of a job on several: ``python -m dsl.node``, which `dsl` starts there."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Python puts the working directory there, whose files are the user's: none of them is a module of ours.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]

    from dsl import _own_process

    _own_process.claim()  # before anything else is imported

    from dsl.cli.node import main

    sys.exit(main())
