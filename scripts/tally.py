"""The last thing that `scripts/test` prints: a table of its steps, and all tests in one line.

    tally.py FOLDER STEP...

FOLDER holds the output of each step that ran, and the file `results` with a line for each: its result, its
name and its seconds. The counts and the reasons are those that pytest, nextest and cargo print at their ends.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

CLOSING = re.compile(
    r"(?:=+ )?\d+ (?:passed|failed|skipped|deselected|error).* in [\d.]+s\b"  # pytest
    r"|test result: "  # cargo
    r"| *Summary \["  # nextest
)
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|ignored)\b")
SAME = {"error": "failed", "errors": "failed", "ignored": "skipped"}
SKIPPED = re.compile(r"SKIPPED \[(\d+)\] (\S+: )?(.+)")
CULPRIT = re.compile(
    r"(?:FAILED|ERROR|UNSTEADY) ([^[ ]*\[.*?\]|[^ ]+)"  # pytest
    r"| *FAIL \[[^]]*\] *(?:\([ 0-9/]*\) *)?(.+)"  # nextest
    r"|test (.*) \.\.\. FAILED|(\S+) --- FAILED"  # cargo, and cargo --quiet
)
MOST_CULPRITS = 5


class Step(NamedTuple):
    """What came of a step."""

    counts: Counter[str]
    reasons: Counter[str]
    culprits: list[str]
    """What failed; of a failed step without such tests, the last line of its output."""


def read(text: str) -> Step:
    """What the output of a step says."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    culprits: dict[str, bool] = {}
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        if CLOSING.match(line):
            for number, word in COUNT.findall(line):
                counts[SAME.get(word, word)] += int(number)
            reasons["ignored in Rust"] += sum(int(number) for number in re.findall(r"(\d+) ignored", line))
        elif found := SKIPPED.match(line):
            reasons[found[3]] += int(found[1])
            counts["skipped"] += 0 if found[2] else int(found[1])  # without a place it is a step's own line
        elif found := CULPRIT.match(line):
            culprits[next(filter(None, found.groups())).strip()] = line.startswith("UNSTEADY")
    return Step(counts, +reasons, sorted(culprits, key=culprits.__getitem__) or lines[-1:])


def why(step: Step, result: str) -> str:
    """The tests that failed, or what skipped ones would need."""
    if result == "failed":
        more = len(step.culprits) - MOST_CULPRITS
        return "; ".join(step.culprits[:MOST_CULPRITS]) + (f"; and {more} more" if more > 0 else "")
    return "; ".join(f"{number} {reason}" for reason, number in step.reasons.most_common())


def main() -> None:
    """Print the table."""
    folder, *steps = sys.argv[1:]
    results: dict[str, list[str]] = {}
    for line in Path(folder, "results").read_text(encoding="utf-8").splitlines():
        result, name, seconds = line.split()
        results[name] = [result, seconds]
    row = "{:<11} {:<8} {:>6} {:>7} {:>7} {:>8}  {}".format
    print(row("step", "result", "time", "passed", "failed", "skipped", "why").rstrip())
    total: Counter[str] = Counter()
    for name in steps:
        if name not in results:
            print(row(name, "not run", "", "", "", "", "").rstrip())
            continue
        result, seconds = results[name]
        step = read(Path(folder, name).read_text(encoding="utf-8", errors="replace"))
        if result == "passed":  # a Rust test that passes when it runs again was counted as failed before
            step.counts["failed"] = 0
        total += step.counts
        counts = [step.counts[word] for word in ("passed", "failed", "skipped")]
        print(row(name, result, f"{seconds} s", *counts, why(step, result)).rstrip())
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")


if __name__ == "__main__":
    main()
