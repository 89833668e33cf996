"""Golden files: what recorders write, and tests read."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"


def cases(name: str, key: str = "cases") -> list[Any]:
    """The cases of a golden file; there is at least one."""
    data = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    found: list[Any] = data[key]
    assert found
    return found


def write(name: str, how: str, **content: list[Any] | str) -> None:
    """Write a golden file: how it was obtained, and what is in it, a case a line."""
    parts = [f'"obtained": {json.dumps(how)}']
    for key, found in content.items():
        rows = [json.dumps(case) for case in found] if isinstance(found, list) else None
        text = json.dumps(found) if rows is None else "[\n" + ",\n".join(rows) + "\n]"
        parts.append(f"{json.dumps(key)}: {text}")
    (GOLDEN / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def torch_version() -> str:
    """The version of torch that is asked."""
    found: str = import_module("torch").__version__.partition("+")[0]
    return found


def outcome(call: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """The result of a call, its exit code, or the builtin exception that it raises."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return {"result": call(*args)}
    except SystemExit as error:
        return {"exit": error.code}
    except Exception as error:  # noqa: BLE001  whatever it raises is the answer
        return {"error": type(error).__name__}
