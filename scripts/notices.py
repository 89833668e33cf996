"""Write the licences of the Rust code inside the wheels into `third-party/`, which the wheels carry.

One file has the licences of the crates; the other one is Rust's own, on its standard library.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "third-party"
CRATES = FOLDER / "crates.txt"
LIBRARY = FOLDER / "rust-standard-library.html"
WORDS = ("license", "copying", "copyright", "notice", "unlicense")


def output(*command: str) -> str:
    """What a command prints; its failure ends the program."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"`{' '.join(command)}` failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def linked_crates(targets: tuple[str, ...]) -> list[dict[str, Any]]:
    """Other people's crates in the extension on these platforms, without what only runs while it is built."""
    platforms = [word for target in targets for word in ("--filter-platform", target)]
    answer = json.loads(output("cargo", "metadata", "--format-version", "1", "--locked", *platforms))
    packages = {package["id"]: package for package in answer["packages"]}
    needs = {node["id"]: node["deps"] for node in answer["resolve"]["nodes"]}
    pending = [key for key, package in packages.items() if package["name"] == "dsl-bindings"]
    found: set[str] = set()
    while pending:
        key = pending.pop()
        if key in found or any("proc-macro" in one["kind"] for one in packages[key]["targets"]):
            continue
        found.add(key)
        pending += [
            dep["pkg"] for dep in needs[key] if any(kind["kind"] is None for kind in dep["dep_kinds"])
        ]
    others = [packages[key] for key in found if packages[key]["source"] is not None]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def licence_files(package: dict[str, Any]) -> list[Path]:
    """The files of a crate that state its licences."""
    folder = Path(package["manifest_path"]).parent
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.lower().startswith(WORDS))


def text_of(crates: list[dict[str, Any]]) -> str:
    """The licences of all crates, each once, below the names of the crates that bring this text."""
    names: dict[tuple[str, ...], list[str]] = {}
    texts: dict[tuple[str, ...], str] = {}
    for crate in crates:
        label = f"{crate['name']} {crate['version']} ({crate['license']})"
        files = licence_files(crate)
        if not files or not crate["license"]:
            sys.exit(f"notices: {label} has no licence file: look at it, and at its repository, by hand")
        for path in files:
            text = path.read_text(encoding="utf-8").strip()
            same = tuple(text.split())  # crates break the lines of the same licence in different places
            texts.setdefault(same, text)
            names.setdefault(same, []).append(label)
    parts = ["The extension of dsl contains these Rust crates. Their licences follow their names."]
    parts += ["\n".join([*names[same], "-" * 80, text]) for same, text in texts.items()]
    return f"\n\n{'=' * 80}\n".join(parts) + "\n"


def write(targets: tuple[str, ...]) -> int:
    """Write both files for wheels of these platforms; the number of crates."""
    crates = linked_crates(targets)
    FOLDER.mkdir(exist_ok=True)
    CRATES.write_text(text_of(crates), encoding="utf-8")
    sysroot = Path(output("rustc", "--print", "sysroot").strip())
    own = sysroot / "share" / "doc" / "rust" / "COPYRIGHT-library.html"
    if not own.exists():
        sys.exit(f"notices: Rust's own notices are missing, {own}: install Rust with rustup")
    shutil.copyfile(own, LIBRARY)
    return len(crates)
