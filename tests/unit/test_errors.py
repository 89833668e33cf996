"""The errors that users see."""

from __future__ import annotations

import pytest

from dsl import errors


@pytest.mark.parametrize(
    "kind, builtin",
    [
        (errors.HostfileError, ValueError),
        (errors.FilterError, ValueError),
        (errors.PlacementError, ValueError),
        (errors.OptionError, ValueError),
        (errors.LogDirError, ValueError),
        (errors.LogDirError, OSError),
        (errors.LogDirIsFileError, NotADirectoryError),
        (errors.ProgramNotFoundError, FileNotFoundError),
        (errors.ProgramNotExecutableError, PermissionError),
        (errors.AcceleratorError, ValueError),
        (errors.NumNodesError, RuntimeError),
        (errors.NoDevicesError, RuntimeError),
        (errors.LauncherError, NotImplementedError),
        (errors.ElasticityConfigError, ValueError),
        (errors.ElasticityConfigError, NotImplementedError),
    ],
)
def test_except_clauses_written_for_deepspeed_or_torch_still_catch(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="message"):
        raise kind("message")
