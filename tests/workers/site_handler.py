"""A program of a site that has an error handler of its own in torch. It launches functions, and says what it heard."""

from __future__ import annotations

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing import errors

from dsl.functions.launcher import ChildFailedError, LaunchConfig, elastic_launch


class Handler(errors.ErrorHandler):  # type: ignore[misc]  # torch may not be installed
    """Writes down what it is told."""

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """Torch 2.15 tells it the name of the function."""
        super().set_entrypoint_fn_name(fn_name)
        sys.stderr.write(f"handler: begin {fn_name}\n")

    def record_success(self) -> None:
        """Torch 2.15 tells it of a good end."""
        sys.stderr.write("handler: success\n")

    def record_exception(self, e: BaseException) -> None:
        """Every torch tells it of an exception."""
        sys.stderr.write(f"handler: exception {e}\n")
        super().record_exception(e)

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
        """Torch 2.15 asks it about a death by a signal."""
        return f"{message}\nGPU 3 has fallen off the bus, see {bool(error_file)}\x07"


errors.get_error_handler = Handler


def works() -> int:
    """A good end."""
    return 7


def fails() -> None:
    """An exception."""
    raise ValueError("bad batch")


def is_killed() -> None:
    """A death by a signal."""
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Launch each function in one worker."""
    config = LaunchConfig(1, 1, 1, max_restarts=0)
    print(elastic_launch(config, works)(), flush=True)
    for function in (fails, is_killed):
        try:
            elastic_launch(config, function)()
        except ChildFailedError as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
