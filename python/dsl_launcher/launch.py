"""``python -m dsl_launcher.launch``: the same as ``python -m dsl.launch``, whatever packages the user has."""

import sys

from dsl.launch import start

if __name__ == "__main__" and (code := start()):
    sys.exit(code)
