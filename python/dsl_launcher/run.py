"""``python -m dsl_launcher.run``: the same as ``python -m dsl.run``, whatever packages the user has."""

import sys

from dsl.run import command

if __name__ == "__main__" and (code := command()):
    sys.exit(code)
