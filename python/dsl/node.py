"""The agent on one host of a job on several: ``python -m dsl.node``, which `dsl` starts there."""

from __future__ import annotations

from dsl import _own_process

if __name__ == "__main__":
    _own_process.claim()  # before anything else is imported

    import sys

    from dsl.cli.node import main

    sys.exit(main())
