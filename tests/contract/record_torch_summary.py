"""Record what torch 2.15 says of failed workers into ``golden/torch_summary.json``. Not part of a test run.

From the root of the repository, with a Python that has torch 2.15::

    python -m tests.contract.record_torch_summary

The file says how it was obtained. It holds ``files``: what ``@record`` writes when programs end, and ``cases``:
failed workers, and what torch's ChildFailedError says of them. Nothing in it is written by hand. The host's name,
the time zone and the time at which a failure is noticed are fixed, and error files have relative paths.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from tests.contract.golden_file import torch_version, write

HOST = "node7.example"
NOW = 1_767_323_045  # 2026-01-02 03:04:05 UTC

PROGRAMS = {
    "exception": 'raise ValueError("bad batch")',
    "exception of several lines": 'raise RuntimeError("first\\nsecond\\n\\n  indented \\u00fc \\U0001f600")',
    "chained exceptions": """try:
        {}['key']
    except KeyError as error:
        raise OSError(5, 'disk') from error""",
    "exception without a message": "raise MemoryError",
    "exception with control characters": 'raise ValueError("a\\x00b\\x1b[31mred\\x1b[0m\\tc\\r\\nd")',
    "exit code": "raise SystemExit(3)",
    "no failure": "return",
    "worker below": """from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    text = '{"message": {"message": "E: below", "extraInfo": {"py_callstack": "stack", "timestamp": "9"}}}'
    with open('below.json', 'w') as file:
        file.write(text)
    raise ChildFailedError('below', {0: ProcessFailure(0, 7, -11, 'below.json')})""",
}

FRAME = """from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    {body}

main()
"""


def record_files() -> dict[str, str | None]:
    """What each program leaves in its error file (None: no file)."""
    found = {}
    for name, body in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "train.py").write_text(FRAME.format(body=body), encoding="utf-8")
            error_file = Path(folder, "error.json")
            env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)}
            command = [sys.executable, "train.py"]
            subprocess.run(command, cwd=folder, env=env, check=False, capture_output=True)
            text = error_file.read_text(encoding="utf-8") if error_file.exists() else None
        for path, shown in ((folder, "/home/ann"), (sys.prefix, "/opt/python")):
            text = text and text.replace(path, shown)
        found[name] = text
    return found


def _worker(
    rank: int, pid: int, exitcode: int, content: Any = None, *, at: int = NOW, local: int | None = None
) -> dict[str, Any]:
    text = content if content is None or isinstance(content, str) else json.dumps(content)
    local_rank = rank if local is None else local
    keys = ("rank", "local_rank", "pid", "exitcode", "content", "noticed_s")
    return dict(zip(keys, (rank, local_rank, pid, exitcode, text, at), strict=True))


def _exception(at: Any, **parts: Any) -> dict[str, Any]:
    return {"message": {"extraInfo": {"timestamp": at, **parts.pop("extra", {})}, **parts}}


def inputs(files: dict[str, str | None]) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """Name and failed workers of each case."""
    one = {
        "exit code": _worker(0, 123, 1),
        "exit code 255 of a later node": _worker(13, 4_194_304, 255, local=5),
        "SIGKILL": _worker(0, 123, -9),
        "SIGSEGV": _worker(1, 5, -11),
        "real-time signal with a name": _worker(1, 5, -34),
        "signal without a name": _worker(1, 5, -40),
        "plain text": _worker(0, 123, 1, {"message": "it broke", "timestamp": NOW - 5}),
        "plain text, time as text": _worker(0, 123, 1, {"message": "it broke", "timestamp": str(NOW - 5)}),
        "plain text of lines": _worker(0, 123, 1, {"message": "first\nsecond\n", "timestamp": NOW}),
        "plain text and a signal": _worker(0, 123, -6, {"message": "abort: x", "timestamp": NOW}),
        "plain text without a time": _worker(0, 123, 1, {"message": "it broke"}),
        "empty text": _worker(0, 123, 1, {"message": "", "timestamp": NOW}),
        "empty text and a signal": _worker(0, 123, -9, {"message": "", "timestamp": NOW}),
        "message without a traceback": _worker(0, 123, 1, _exception(NOW - 2, message="E: x\ny")),
        "traceback without a message": _worker(
            0, 123, 1, _exception(NOW - 2, extra={"py_callstack": "stack\n  in\n"})
        ),
        "empty traceback": _worker(0, 123, 1, _exception(NOW - 2, message="E", extra={"py_callstack": ""})),
        "neither traceback nor message": _worker(0, 123, 1, _exception(NOW - 2)),
        "time as a number": _worker(0, 123, 1, _exception(NOW - 2, message="E", extra={"py_callstack": "s"})),
        "time with a fraction": _worker(
            0, 123, 1, _exception(NOW - 1.5, message="E", extra={"py_callstack": "s"})
        ),
        "dollars and percents": _worker(0, 123, 1, {"message": "${rank} $x %s {y}", "timestamp": NOW}),
        "long line": _worker(0, 123, 1, {"message": "x" * 200, "timestamp": NOW}),
    }
    cases = {name: ("train.py", [worker]) for name, worker in one.items()}
    for name, text in files.items():
        if text is not None:
            cases[f"recorded: {name}"] = ("./train.py", [_worker(2, 77, 1, text)])
    cases["long name"] = ("/a/long/path/" * 6 + "train.py", [_worker(0, 1, 1)])
    cases["name wider than all lines"] = ("n" * 57, [_worker(0, 1, 1, {"message": "m", "timestamp": NOW})])
    cases["short lines"] = ("t", [_worker(0, 1, 1, {"message": "m", "timestamp": NOW})])
    cases["two, the first is the cause"] = ("t", [_worker(0, 1, 1), _worker(1, 2, -15, at=NOW + 3)])
    cases["two, the second is the cause"] = ("t", [_worker(0, 1, 1, at=NOW + 3), _worker(1, 2, -9)])
    cases["two in one second"] = ("train.py", [_worker(0, 1, 1), _worker(1, 2, -9)])
    cases["sixteen"] = ("t.py", [_worker(rank, 100 + rank, 1, at=NOW - rank) for rank in range(16)])
    raised = files["exception"]
    cases["recorded cause among others"] = (
        "train.py",
        [
            _worker(8, 1, -6, at=2**32, local=0),
            _worker(9, 2, 1, raised, local=1),
            _worker(10, 3, 1, at=2**33),
        ],
    )
    return cases


def record_case(errors: Any, name: str, workers: list[dict[str, Any]]) -> dict[str, Any]:
    """What torch says of these workers, whose error files lie in the working directory."""
    failures = {}
    for worker in workers:
        path = Path(f"attempt_0/{worker['local_rank']}/error.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if worker["content"] is not None:
            path.write_text(worker["content"], encoding="utf-8")
        with mock.patch.object(time, "time", return_value=float(worker["noticed_s"])):
            numbers = (worker["local_rank"], worker["pid"], worker["exitcode"])
            failures[worker["rank"]] = errors.ProcessFailure(*numbers, str(path))
    error = errors.ChildFailedError(name, failures)
    return {
        "first": error.get_first_failure()[0],
        "text": error.format_msg(),
        "other_rules": error.format_msg("#", "+") if len(workers) == 2 else None,
        "failures": [
            {
                "message": failure.message,
                "timestamp": failure.timestamp,
                "isoformat": failure.timestamp_isoformat(),
                "signal_name": failure.signal_name(),
                "error_file": failure.error_file,
                "error_file_data": failure.error_file_data if failure.error_file != "<N/A>" else None,
            }
            for failure in failures.values()
        ],
    }


def main() -> None:
    """Record everything."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    errors = import_module("torch.distributed.elastic.multiprocessing.errors")
    files = record_files()
    before = Path.cwd()
    cases: list[Any] = []
    with tempfile.TemporaryDirectory() as folder, mock.patch("socket.getfqdn", return_value=HOST):
        os.chdir(folder)
        for label, (name, workers) in inputs(files).items():
            cases.append([label, name, workers, record_case(errors, name, workers)])
        os.chdir(before)
    how = (
        f"torch {torch_version()}: files: what @record leaves in TORCHELASTIC_ERROR_FILE (null: nothing) after each of the "
        "programs of the recorder; cases: ChildFailedError and ProcessFailure of the workers given, with the "
        "host's name and the time fixed, as label, name, workers, answer"
    )
    write("torch_summary", how, host=HOST, files=list(files.items()), cases=cases)


if __name__ == "__main__":
    main()
