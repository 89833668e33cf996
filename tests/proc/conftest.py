"""What the tests with real workers share."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
from tests.support import terminal as support

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tests.support.terminal import Terminal


@pytest.fixture(params=support.MODES)
def terminal(request: pytest.FixtureRequest) -> Callable[..., AbstractContextManager[Terminal]]:
    """`tests.support.terminal.terminal` in each of its modes: the results must be the same."""
    return functools.partial(support.terminal, mode=request.param)
