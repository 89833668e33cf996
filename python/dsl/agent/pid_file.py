"""The file of ``--save_pid``."""

from __future__ import annotations

import os

from dsl.errors import PidFileError


class PidFile:
    """A file with the agent's pid for as long as the job runs."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(self._path, flags, 0o600)
        except OSError as error:
            message = (
                f"cannot write the pid file {self._path}: {error.strerror}, remove it if it is a leftover"
            )
            raise PidFileError(message) from error
        try:
            os.write(file, str(os.getpid()).encode())
        except OSError as error:
            self.__exit__()
            raise PidFileError(f"cannot write the pid file {self._path}: {error.strerror}") from error
        finally:
            os.close(file)

    def __exit__(self, *_: object) -> None:
        try:
            os.unlink(self._path)
        except OSError:
            return  # somebody has tidied up before us
