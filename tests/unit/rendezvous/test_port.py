"""The choice of the master port."""

from __future__ import annotations

import pytest
from tests.support.machine import FREE_PORT, make_facts

from dsl.errors import PortError
from dsl.rendezvous.static import choose_port


@pytest.mark.parametrize(
    "asked, shared, taken, expected",
    [
        (None, False, (), (29500, False)),
        (None, True, (), (29500, False)),
        (None, False, (29500,), (FREE_PORT, True)),
        (29500, False, (), (29500, False)),
        (1234, True, (29500,), (1234, False)),
        (0, False, (), (FREE_PORT, False)),
    ],
)
def test_the_port_that_is_used(
    *,
    asked: int | None,
    shared: bool,
    taken: tuple[int, ...],
    expected: tuple[int, bool],
) -> None:
    assert choose_port(asked, shared=shared, ports=make_facts(taken=taken).ports) == expected


@pytest.mark.parametrize(
    "asked, shared, message",
    [
        (
            29500,
            False,
            "master port 29500 is taken by pid 9 (python old.py); choose another, or 0 for any free one",
        ),
        (
            None,
            True,
            "master port 29500 is taken by pid 9 (python old.py); choose another, the same on every node",
        ),
        (0, True, "master port 0: a job on several nodes needs the same port on each"),
        (-2, False, "master port -2 is none, expected 1 to 65535"),
        (65536, False, "master port 65536 is none"),
    ],
)
def test_the_port_that_is_refused(asked: int | None, *, shared: bool, message: str) -> None:
    with pytest.raises(PortError) as caught:
        choose_port(asked, shared=shared, ports=make_facts(taken=(29500,)).ports)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("asked, port", [(None, 29500), (29500, 29500), (7, 7)])
def test_a_port_that_is_taken_here_may_be_free_where_rank_0_listens(asked: int | None, port: int) -> None:
    ports = make_facts(taken=(7, 29500)).ports
    assert choose_port(asked, shared=True, ports=ports, here=False) == (port, False)
