"""Reading of what `record_golden` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"


def cases(name: str, key: str = "cases") -> list[Any]:
    """The cases of a golden file; there is at least one."""
    data = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    found: list[Any] = data[key]
    assert found
    return found
