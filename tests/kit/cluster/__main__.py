"""Fetch what a cluster needs: `python -m tests.kit.cluster`."""

from __future__ import annotations

import os
import sys

from tests.kit.cluster.packages import Missing, prepare


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("set-up: tests across hosts need root, which makes their namespaces: they will be skipped")
    try:
        prepare()
    except Missing as missing:
        sys.exit(f"set-up: {missing}")


if __name__ == "__main__":
    main()
