"""``python -m dsl_launcher.node``: the agent on one host of a job, which `dsl` starts on that host."""

import sys

if __name__ == "__main__":
    from dsl import _own_process

    _own_process.claim()  # before anything else is imported

    from dsl.agent.node import main

    sys.exit(main())
