"""Record what hwloc says of made-up machines into ``golden/hwloc.json``. Not part of a test run.

From the root of the repository, with hwloc's lstopo installed (Debian: ``hwloc``) and a Python that has this
package::

    python -m tests.contract.record_hwloc
    python -m tests.contract.record_hwloc --compare FOLDER

The second records nothing: it holds our answers against hwloc's for captured machines, archives of ``/proc`` and
``/sys`` such as hwloc-gather-topology makes and hwloc's own tests are (``tests/hwloc/linux/*.tar.bz2``).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from tests.contract import hwloc_answers
from tests.contract.hwloc_captures import Capture, captures
from tests.contract.hwloc_inputs import Root, kernel_mask, roots, write_for_hwloc, write_root
from tests.contract.hwloc_view import View, differences

GOLDEN = Path(__file__).parent / "golden"


def answers(root: Root) -> dict[str, View]:
    """``whole`` machine, and, if something may not be used, what is left (``cut``)."""
    with tempfile.TemporaryDirectory() as folder:
        write_root(root, Path(folder))
        write_for_hwloc(root, Path(folder))
        found = {"whole": hwloc_answers.ask(folder, "--disallowed")}
        if root.is_cut():
            mask = [] if root.cgroup else ["--restrict", _hwloc_mask(root)]
            found["cut"] = hwloc_answers.ask(folder, *mask)
    return found


def _hwloc_mask(root: Root) -> str:
    return ",".join(f"0x{word}" for word in kernel_mask(root.machine.cpus()).split(","))


def record() -> None:
    """Record everything."""
    how = (
        f"{hwloc_answers.version()}: of each machine of hwloc_inputs, what there is (whole) and what may be used "
        "(cut), in the form of hwloc_view"
    )
    cases = [
        json.dumps([name, {part: view._asdict() for part, view in answers(root).items()}])
        for name, root in roots()
    ]
    text = f'{{\n"obtained": {json.dumps(how)},\n"cases": [\n' + ",\n".join(cases) + "\n]\n}\n"
    (GOLDEN / "hwloc.json").write_text(text, encoding="utf-8")


def compare(folder: Path) -> None:
    """Print for each captured machine whether hwloc and we agree, and count."""
    agree, explained, differ = 0, 0, 0
    for capture in captures(folder):
        found = _differences(capture)
        if not found:
            agree += 1
            print(f"{capture.name}: agree")
            continue
        explained += bool(capture.reason)
        differ += not capture.reason
        print(f"{capture.name}: differ: {capture.reason or 'NO REASON KNOWN'}")
        print("".join(f"    {line}\n" for line in found), end="")
    total = agree + explained + differ
    print(f"{total} machines: {agree} agree, {explained} differ with a reason, {differ} without")


def _differences(capture: Capture) -> list[str]:
    return [
        *[f"whole machine, {line}" for line in differences(capture.ours, capture.theirs)],
        *[
            f"what may be used, {line}"
            for line in differences(capture.ours_cut, capture.theirs_cut, cut=True)
        ],
    ]


def main() -> None:
    """Record, or compare."""
    parser = argparse.ArgumentParser(description="what hwloc says of machines")
    parser.add_argument("--compare", metavar="FOLDER", type=Path, help="of captured machines; record nothing")
    folder = parser.parse_args().compare
    if folder is None:
        record()
    else:
        compare(folder)


if __name__ == "__main__":
    main()
