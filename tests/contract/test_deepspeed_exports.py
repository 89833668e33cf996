"""Variables that go to other hosts against those of DeepSpeed 0.19.8 (golden/exports.json)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.golden_file import cases
from tests.support.machine import make_facts

from dsl.devices.accelerators import ACCELERATORS
from dsl.plan.remote import remote_variables
from dsl.resources.exports import MARK

# Env files that DeepSpeed refuses with a traceback, or takes the quotation marks of.
OURS: dict[tuple[str, ...], dict[str, str]] = {
    ("A=1\n\nB=2\n",): {"A": "1", "B": "2"},
    ("# note\n",): {},
    ("A=b # c\nB='q'\nC=$HOME\nD=\n",): {"A": "b # c", "B": "q", "C": f"{MARK}HOME{MARK}", "D": ""},
}
PLACES = {"HOME": "/home/me/.deepspeed_env", "CWD": "CWD/.deepspeed_env", "ABSOLUTE": "/ABSOLUTE"}


@pytest.mark.parametrize("case", cases("exports"), ids=lambda case: f"{case[0]} {len(case[1])} {case[2]}")
def test_what_travels(case: list[Any]) -> None:
    accelerator, env, files, answer = case
    own = env.get("DS_ENV_FILE")
    environ = {
        **env,
        "DS_ACCELERATOR": accelerator,
        **({"DS_ENV_FILE": "/ABSOLUTE"} if own == "ABSOLUTE" else {}),
    }
    places = {**PLACES, "HOME/my.env": "/home/me/my.env", "CWD/my.env": "CWD/my.env"}
    texts = {places[name]: text for name, text in files.items()}
    facts = make_facts(environ=environ, files=texts, cwd="CWD")
    found = dict(remote_variables((), facts)[0])
    key = tuple(files.values())
    expected = {"PYTHONPATH": "CWD", **OURS[key]} if key in OURS else answer["result"]
    assert found == expected
    assert (key in OURS) <= (answer.get("result") != expected)


def test_all_accelerators_were_asked() -> None:
    assert {case[0] for case in cases("exports")} == set(ACCELERATORS)
