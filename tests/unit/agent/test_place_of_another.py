"""What `dslrun` names for another node: the words of the user, but for the place."""

from __future__ import annotations

import pytest

from dsl.agent.joining import without_place
from dsl.model.request import Program


@pytest.mark.parametrize(
    "argv, before, after",
    [
        ("dslrun --nnodes 2 t.py 1", "dslrun --nnodes 2", "t.py 1"),
        ("dslrun --nnodes 2 --node-rank 0 --role x t.py 1", "dslrun --nnodes 2", "--role x t.py 1"),
        ("dslrun --node_rank=0 --nnodes 2 t.py 1", "dslrun", "--nnodes 2 t.py 1"),
        ("dslrun --nnodes 2 --node-r 0 t.py -- 1", "dslrun --nnodes 2", "t.py -- 1"),
        (
            "python -m dsl.run --no-python --nnodes 2 t.py 1",
            "python -m dsl.run --no-python --nnodes 2",
            "t.py 1",
        ),
        ("dslrun --nnodes 2 other.py", "", ""),
        ("", "", ""),
        (f"dslrun --role {'x' * 2000} t.py 1", "", ""),
    ],
)
def test_the_place_is_taken_out(argv: str, before: str, after: str) -> None:
    program = Program("script", "t.py", args=("1",))
    words = without_place(tuple(argv.split()), program, {})
    assert [" ".join(some) for some in words] == [before, after] * bool(before)


def test_options_of_the_environment_belong_to_it() -> None:
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "HOME": "/"}
    words = without_place(("dslrun", "t.py"), Program("script", "t.py"), environ)
    assert words == (("env", "PET_NNODES=2", "dslrun"), ("t.py",))
