"""List the guarantees of docs/design.md, each with the tests that hold it: ``guarantees.py [G1 ...]``.

A Python test names its guarantees by ``@pytest.mark.guarantee("G1")``, or its module does by ``pytestmark``.
A test in Rust has their numbers in its comment. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"\bG\d+\b")
RUST_TEST = re.compile(r"((?:^[ \t]*//.*\n)+)(?:[ \t]*#\[.*\]\n)+[ \t]*fn (\w+)", re.MULTILINE)


def promises() -> dict[str, str]:
    """Each guarantee's number and its promise, from the table in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| (G\d+) \| (.+) \|$", text, re.MULTILINE))


def marked(nodes: list[ast.expr]) -> set[str]:
    """The numbers in the markers among some expressions."""
    calls = (call for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call))
    return {
        str(ast.literal_eval(argument))
        for call in calls
        if ast.unparse(call.func) == "pytest.mark.guarantee"
        for argument in call.args
    }


def python_tests(path: Path) -> Iterator[tuple[str, set[str]]]:
    """Each test of a file that holds guarantees, and their numbers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_module = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            numbers = marked([*of_module, *node.decorator_list])
            if numbers:
                yield f"{path.relative_to(ROOT)}::{node.name}", numbers


def rust_tests(path: Path) -> Iterator[tuple[str, set[str]]]:
    """The same for a file of the engine's tests."""
    for comment, name in RUST_TEST.findall(path.read_text(encoding="utf-8")):
        if numbers := set(NUMBER.findall(comment)):
            yield f"{path.relative_to(ROOT)}::{name}", numbers


def holders() -> dict[str, list[str]]:
    """The tests of each guarantee."""
    found: dict[str, list[str]] = {number: [] for number in promises()}
    tests = [one for path in sorted((ROOT / "tests").rglob("test_*.py")) for one in python_tests(path)]
    tests += [one for path in sorted((ROOT / "rust").rglob("*.rs")) for one in rust_tests(path)]
    for test, numbers in tests:
        for number in numbers:
            found.setdefault(number, []).append(test)
    return found


def main() -> None:
    """Print the guarantees that are asked for, or all."""
    wanted, known = sys.argv[1:], promises()
    if unknown := [number for number in wanted if number not in known]:
        sys.exit(f"no such guarantee: {unknown[0]} (docs/design.md has {', '.join(known)})")
    for number, tests in holders().items():
        if not wanted or number in wanted:
            print(f"{number} ({len(tests)} tests): {known.get(number, 'no promise of docs/design.md')}")
            print("".join(f"  {test}\n" for test in tests))


if __name__ == "__main__":
    main()
