"""The errors that users see."""

from __future__ import annotations

import inspect

import pytest

from dsl import errors

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.DslError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_drawn_with_its_exit_code(kind: type[errors.DslError]) -> None:
    lines = [line.split() for line in (errors.__doc__ or "").splitlines()]
    drawn = {
        word: line[line.index(word) + 1 :][:1] for line in lines for word in line if word == kind.__name__
    }
    is_a_mere_parent = kind is errors.ProgramError
    assert kind.__name__ in drawn
    assert drawn[kind.__name__] == ([] if is_a_mere_parent else [str(kind.exit_code)])


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
