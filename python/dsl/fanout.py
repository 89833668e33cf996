"""What reaches many hosts by ssh: ``python -m dsl.fanout``, which `dsl` starts on the launching host."""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from dsl.cli.fanout import main

    sys.exit(main())
