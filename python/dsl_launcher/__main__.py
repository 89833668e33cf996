"""``python -m dsl_launcher``: the command ``dsl``."""

import sys

from dsl.__main__ import main

if __name__ == "__main__" and (code := main()):
    sys.exit(code)
