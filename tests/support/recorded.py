"""Lines of ``--events``, each checked against its schema."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from tests.support.jobs import complete_lines

DOCS = Path(__file__).resolve().parents[2] / "docs"


@cache
def validator() -> Any:
    return Draft202012Validator(json.loads((DOCS / "events.schema.json").read_text(encoding="utf-8")))


def checked(line: str | bytes) -> dict[str, Any]:
    """The fields of a line that is what the schema says."""

    def refuse(text: str) -> None:
        raise ValueError(text)

    fields: dict[str, Any] = json.loads(line, parse_constant=refuse)
    validator().validate(fields)
    return fields


def recorded(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [checked(line) for line in complete_lines(path)]


def only(event: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines about one kind of event."""
    return [one for one in found if one["event"] == event]
