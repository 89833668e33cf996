"""Text of files that the plan reads: hostfiles, descriptions of a pod."""

from __future__ import annotations

import os


class Files:
    """Files of this machine."""

    def read_text(self, path: str) -> str | None:
        """See `read_text`."""
        return read_text(path)


def read_text(path: str) -> str | None:
    """Text of a file, None if it is no regular file. Bytes that are not UTF-8 come as surrogates.

    Raises:
        OSError: the file is there but cannot be read.
    """
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()
