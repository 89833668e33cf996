"""Write docs/api.md from the docstrings and types of the public modules, and of the extension's stub.

scripts/api_docs.py           write it
scripts/api_docs.py --check   end with 1 if it is not what would be written
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
MODULES = ("dsl", "dsl.functions", "dsl.run", "dsl.launch", "dsl.runner", "dsl.elasticity", "dsl.errors")
"""In the order of the page."""

EVENTS = ROOT / "docs" / "events.md"
HEAD = """\
# API

What Python programs import from dsl: types, units and errors. [functions.md](functions.md) is the guide.
The docstrings are the source of this page: `make docs` writes it.
"""
WIDTH = 100
"""Characters of a signature in one line."""

HIDDEN = {"start_fork_server", "join_fork_server", "fork_server", "fork_entry", "relayed", "of"}
"""Methods and fields that only dsl itself can use: they need names that are private."""

SHORT = 350
"""Characters of the text of a method that is a line of a list; longer ones have a heading."""

SHOWN_METHODS = ("__enter__",)
"""Methods with underscores that a user has to know of."""


def page() -> str:
    """The whole text."""
    package = griffe.load("dsl", search_paths=[ROOT / "python"], allow_inspection=False)
    assert isinstance(package, griffe.Module)
    parts = [HEAD, "\n".join(f"- [{name}](#{_anchor(name)})" for name in MODULES)]
    for name in MODULES:
        module = package if name == "dsl" else package[name.partition(".")[2]]
        parts += [f"## {name}", *_prose(module), *_members(module)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _anchor(name: str) -> str:
    return name.replace(".", "")


def _members(module: griffe.Module) -> Iterator[str]:
    """Every public name of a module: those it lists, or in their order those without an underscore."""
    own = [name for name, member in module.members.items() if not (name.startswith("_") or member.is_alias)]
    listed = own if module.exports is None else module.exports
    same, events, errors = [], [], []
    on_page = re.findall(r"^### (\w+)$", EVENTS.read_text(encoding="utf-8"), re.MULTILINE)
    for name in map(str, listed):
        member = module[name]
        target = member.final_target if isinstance(member, griffe.Alias) else member
        if module.path == "dsl.launch" and target.path.startswith("dsl.run."):
            same.append(f"`{name}`")
        elif name in on_page:
            events.append(f"[{name}](events.md#{name.lower()})")
        elif isinstance(target, griffe.Class) and _is_plain_error(target):
            bases = ", ".join(map(str, target.bases))
            errors.append(f"- `{name}({bases})`: {' '.join(' '.join(_prose(target)).split())}")
        elif isinstance(target, griffe.Class):
            yield from _class(name, target)
        elif isinstance(target, griffe.Function):
            yield from (f"### {name}", _code(_wrapped(target.signature(name=name))), *_prose(target))
        elif isinstance(target, griffe.Attribute) and target.docstring is not None:
            yield from (f"### {name}", *_prose(target))
        elif isinstance(target, griffe.Attribute) and name != "__version__" and not _is_private(target):
            yield from (f"### {name}", _code(_union(f"{name} = {target.value}")))
    if same:
        yield f"The same as in [dsl.run](#dslrun): {', '.join(same)}."
    if events:
        yield f"Events and their parts, with their fields: {', '.join(events)}."
    if errors:
        yield "Errors:\n\n" + "\n".join(errors)


def _is_plain_error(one: griffe.Class) -> bool:
    """Whether a class is an error that has nothing of its own but an exit code."""
    is_error = any(str(base).endswith(("Error", "Exception")) for base in one.bases)
    return is_error and {member.name for member in _public(one)} <= {"exit_code"}


def _is_private(attribute: griffe.Attribute) -> bool:
    """What only type checkers look at, and what a module keeps for itself."""
    return attribute.name == "TYPE_CHECKING" or attribute.name.startswith("_")


def _class(name: str, one: griffe.Class) -> Iterator[str]:
    """A class: how it is made, what it has, what it does."""
    bases = ", ".join(base for base in map(str, one.bases) if not base.startswith("_"))
    yield f"### {name}"
    new = one.members.get("__init__") or one.members.get("__new__")
    if isinstance(new, griffe.Alias):
        new = None
    is_error = any(str(base).endswith(("Error", "Exception", "SystemExit")) for base in one.bases)
    line = f"class {name}({bases})" if bases else f"class {name}"
    if isinstance(new, griffe.Function) and not (is_error and name.startswith("Signal")):
        line += f"\n\n{_wrapped(new.signature(return_type=False, name=name))}"
    yield _code(line)
    yield from _prose(one)
    if isinstance(new, griffe.Function):
        yield from _prose(new)
    attributes = [
        _attribute(member)
        for member in _public(one)
        if isinstance(member, griffe.Attribute) and (member.annotation or member.docstring)
    ]
    if attributes and "dataclass" not in one.labels:  # its fields are its parameters
        yield "\n".join(attributes)
    short, long = [], []
    for method in _public(one):
        if isinstance(method, griffe.Function):
            is_static = "staticmethod" in method.labels or "classmethod" in method.labels
            signature = method.signature(name=f"{name}.{method.name}" if is_static else method.name)
            prose = list(_prose(method))
            text = " ".join(" ".join(prose).split())
            if len(signature) <= WIDTH and len(text) <= SHORT and not any("\n\n" in one for one in prose):
                short.append(f"- `{signature}`: {text}")
            else:
                long += [f"#### {name}.{method.name}", _code(_wrapped(signature)), *prose]
    yield "\n".join(short)
    yield from long


def _public(one: griffe.Class) -> Iterable[griffe.Object | griffe.Alias]:
    return [
        member
        for member in one.members.values()
        if member.name not in HIDDEN and (not member.name.startswith("_") or member.name in SHOWN_METHODS)
    ]


def _attribute(attribute: griffe.Attribute) -> str:
    # What a constructor assigns is no default.
    is_default = attribute.value is not None and "instance-attribute" not in attribute.labels
    default = f" = {attribute.value}" if is_default else ""
    text = " ".join(" ".join(_prose(attribute)).split())
    kind = re.sub(r"^Final\[(.*)\]$", r"\1", str(attribute.annotation or ""))
    kind = f": {kind}" if kind else ""
    return f"- `{attribute.name}{kind}{default}`{': ' + text if text else ''}"


def _wrapped(signature: str) -> str:
    """A long signature with a line for each parameter."""
    head, _, rest = signature.partition("(")
    if len(signature) <= WIDTH:
        return signature
    depth, start, parameters, is_quoted = 0, 0, [], False
    for at, mark in enumerate(rest):
        is_quoted ^= mark == "'"
        if is_quoted:
            continue
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0 or (mark == "," and depth == 0):
            parameters.append(rest[start:at].strip())
            start = at + 1
        if depth < 0:
            break
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{head}(\n{lines}){rest[start:]}"


def _union(alias: str) -> str:
    """A long alias of several types with a line for each."""
    if len(alias) <= WIDTH:
        return alias
    name, _, types = alias.partition(" = ")
    lines = "\n    | ".join(types.split(" | "))
    return f"{name} = (\n    {lines}\n)"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _prose(item: griffe.Object | griffe.Alias) -> Iterator[str]:
    """The docstring as Markdown: paragraphs, literal blocks behind ``::``, sections as lists."""
    if item.docstring is None:
        return
    for section in item.docstring.parse("google"):
        if isinstance(section, griffe.DocstringSectionText):
            yield from _paragraphs(section.value)
        elif isinstance(section, griffe.DocstringSectionRaises):
            entries = [f"- `{one.annotation}`: {' '.join(one.description.split())}" for one in section.value]
            yield "Raises:\n\n" + _quoted("\n".join(entries))
        else:
            raise TypeError(f"{item.path}: a docstring with a section {section.kind.value!r}: render it here")


def _paragraphs(text: str) -> Iterator[str]:
    is_literal = False
    for block in re.split(r"\n[ ]*\n", text):
        indented = all(line.startswith("    ") or not line for line in block.split("\n"))
        if block.strip() == "::":
            is_literal = True
        elif is_literal and (indented or block.startswith("DslError")):
            yield _fenced(block)
            is_literal = indented
        else:
            is_literal = block.endswith("::")
            yield _quoted(block[:-1] if is_literal else block)


def _fenced(block: str) -> str:
    lines = [line.removeprefix("    ") for line in block.split("\n")]
    language = "text" if "|--" in block else "python"
    return f"```{language}\n" + "\n".join(lines) + "\n```"


def _quoted(text: str) -> str:
    """Names in the single or double back quotes of docstrings, as code; stars and angles as they are."""
    text = re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([*_<])", r"\\\1", part) for part in parts)


def problems() -> list[str]:
    """One line if the page is not what would be written."""
    written = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return (
        []
        if written == page()
        else [f"{PAGE.relative_to(ROOT)} is not what the docstrings say: run make docs"]
    )


def main() -> None:
    """Write the page, or compare it."""
    if "--check" in sys.argv[1:]:
        found = problems()
        print("\n".join(found) or f"{PAGE.relative_to(ROOT)} is up to date")
        sys.exit(bool(found))
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
