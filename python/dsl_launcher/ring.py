"""``python -m dsl_launcher.ring``: a worker of ``dsl --doctor --ring``, in place of the user's script."""

import sys

if __name__ == "__main__":
    from dsl.doctor.ring import main

    sys.exit(main())
