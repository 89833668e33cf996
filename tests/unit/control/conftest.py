"""Both ends of a connection for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.links import Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()
