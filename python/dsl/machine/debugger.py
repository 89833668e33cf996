"""Whether the workers' interpreter has debugpy."""

from __future__ import annotations

from dsl.errors import OptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

ASK = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('debugpy') else 3)"
LACKS = 3
ASK_S = 30.0


def check_debugger(interpreter: str, environ: Mapping[str, str], cwd: str = "") -> None:
    """Refuse an interpreter without debugpy. Another check refuses an interpreter that cannot be executed.

    Raises:
        OptionError: the interpreter has no debugpy.
    """
    import subprocess

    quiet = subprocess.DEVNULL
    try:
        result = subprocess.run(
            [interpreter, "-c", ASK],
            cwd=cwd or None,
            env=dict(environ),
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return
    if result.returncode == LACKS:
        raise OptionError(
            f"--debug needs debugpy, which {interpreter} does not have: pip install debugpy there"
        )
