"""What `dslrun` names for another node: the words of the user, but for the place."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.machine import make_facts
from tests.support.requests import make_request

from dsl.agent.joining import without_place
from dsl.model.job import Job
from dsl.plan.job import plan_job


def job_of(*args: str, **wish: Any) -> Job:
    return plan_job(make_request("torch", "t.py", *args, **wish), make_facts()).job


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
    words = without_place(tuple(argv.split()), job_of("1"), {})
    assert [" ".join(some) for some in words] == [before, after] * bool(before)


def test_options_of_the_environment_belong_to_it() -> None:
    environ = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "HOME": "/"}
    words = without_place(("dslrun", "t.py"), job_of(), environ)
    assert words == (("env", "PET_NNODES=2", "dslrun"), ("t.py",))


def test_a_value_that_may_be_secret_is_left_to_the_other_node() -> None:
    """The line may go to a log. There ``-x NAME`` takes the value of that node, or warns that it has none."""
    options = "-x HF_TOKEN=one -xHF_TOKEN=two --env=WANDB_API_KEY=x=y --env A=1 -x DB=https://me:word@host/ --role r"
    variables = ("HF_TOKEN=one", "HF_TOKEN=two", "WANDB_API_KEY=x=y", "A=1", "DB=https://me:word@host/")
    job = job_of("HF_TOKEN=mine", variables=variables)
    line = f"dslrun {options} t.py HF_TOKEN=mine"
    before, after = without_place(tuple(line.split()), job, {"PET_ENV": "HF_TOKEN=three"})
    assert " ".join(before) == (
        "env PET_ENV=HF_TOKEN dslrun -x HF_TOKEN -xHF_TOKEN --env=WANDB_API_KEY --env A=1 -x DB --role r"
    )
    assert after == ("t.py", "HF_TOKEN=mine")
