"""Elasticity, against DeepSpeed 0.19.7: the last version that has it (the golden says how each answer was got).

``python -m tests.contract.record_elasticity --compare 10000`` asks both many more questions.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.contract.elasticity_inputs import ask_ours, ask_ours_sizes, is_equal, reason
from tests.contract.golden_file import cases

from dsl import errors
from dsl.cli.elastic import elastic_lines
from dsl.elasticity import compute_elastic_config, ensure_immutable_elastic_config


def test_answers_are_equal_but_for_listed_defects() -> None:
    """docs/compat.md lists them."""
    unexplained, equal = [], 0
    for question, theirs, undivided in cases("elasticity"):
        ours = ask_ours(question)
        if is_equal(theirs, ours):
            equal += 1
        elif not reason(question, theirs, ours, undivided):
            unexplained.append((question, theirs, ours))
    assert unexplained == []
    assert equal > 250


def test_a_wrong_answer_would_be_found() -> None:
    """No listed defect explains an answer that is wrong by a batch, a world size or a micro batch."""
    changed = 0
    for question, theirs, undivided in cases("elasticity"):
        if not is_equal(theirs, ask_ours(question)) or "error" in theirs:
            continue
        batch, sizes, *micro = theirs["result"]
        wrongs = [
            [batch + 1, sizes, *micro],
            [batch, sizes[1:], *micro],
            [batch, [*sizes, sizes[-1] + 1], *micro],
        ]
        wrongs += [[batch, sizes, micro[0] + 1]] if micro else []
        for wrong in wrongs:
            ours = {"result": wrong}
            assert not is_equal(theirs, ours)
            assert reason(question, theirs, ours, undivided) is None
            changed += 1
    assert changed > 250


def test_numbers_of_workers_are_those_with_which_the_engine_goes_on() -> None:
    for section, theirs in cases("elasticity", "accepted"):
        assert (ask_ours_sizes(section) or []) == theirs, section


@pytest.mark.parametrize("target, error", cases("elasticity", "versions"))
def test_target_versions(target: str, error: str) -> None:
    section = {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1], "version": 0.1}
    if error:
        with pytest.raises(getattr(errors, error)):
            compute_elastic_config({"elasticity": section}, target)
    else:
        assert compute_elastic_config({"elasticity": section}, target)[0] == 6


@pytest.mark.parametrize("seen, section, error", cases("elasticity", "seen"))
def test_what_the_scheduler_has_seen(
    monkeypatch: pytest.MonkeyPatch, seen: Any, section: dict[str, Any], error: str
) -> None:
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)
    if seen is not None:
        monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(seen))
    if error:
        with pytest.raises(getattr(errors, error)):
            ensure_immutable_elastic_config(section)
    else:
        ensure_immutable_elastic_config(section)


@pytest.mark.parametrize("section, size, text", cases("elasticity", "commands"))
def test_the_text_of_the_command(section: dict[str, Any], size: int, text: str) -> None:
    """Byte for byte, but for numbers that numpy spells."""
    config = {"elasticity": {"enabled": True, **section}}
    assert "\n".join(elastic_lines(config, size)) + "\n" == re.sub(r"np\.int64\((\d+)\)", r"\1", text)
