"""``python -m dsl_launcher.fanout``: runs the programs that reach the hosts of a job (`dsl.agent.keeper`)."""

import sys

if __name__ == "__main__":
    from dsl.agent.keeper import main

    sys.exit(main())
