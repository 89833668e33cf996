"""Draw the pictures of the documents into docs/pictures, each for light and for dark pages.

Diagrams come from the text beside them (`*.d2`), the recording of a failure from a real run of `dsl` on this
machine, and the charts from `charts.json`, where the figures of the last `make bench` replace older ones. The
tables of the pages of benchmarks come from `rows.json` in the same way.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import re
import struct
import subprocess
import sys
import sysconfig
import tempfile
import termios
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # started as a file, not with -m
    sys.path.insert(0, str(ROOT))

from benches import charts, tables  # noqa: E402  needs the path above
from benches.measure import Bars  # noqa: E402  as above

PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "bench-results" / "bench.json"
FIGURES = PICTURES / "charts.json"
"""What the charts show. Some of it was measured on other machines."""

THEMES = {"light": "0", "dark": "200"}
"""Of D2."""

WIDTH = 92
"""Columns of the recorded terminal."""

TRAINING = """\
import os, sys, time

rank = int(os.environ["RANK"])
for step in (20, 40):
    print(f"step {step}  loss {2.1 / (step / 20 + rank / 10):.4f}", flush=True)
    time.sleep(0.3)
if rank == 3:
    raise ValueError("batch 40 holds NaN")
time.sleep(60)
"""


def draw_diagrams(folder: Path) -> None:
    """Draw each text of docs/pictures into a folder."""
    program = f"{sysconfig.get_path('scripts')}/d2"
    for source in sorted(PICTURES.glob("*.d2")):
        for scheme, theme in THEMES.items():
            drawn = folder / f"{source.stem}-{scheme}.svg"
            look = ("--theme", theme, "--scale", "0.75", "--pad", "10", "--omit-version")
            subprocess.run([program, *look, str(source), str(drawn)], check=True, capture_output=True)
            drawn.chmod(0o644)


def record_failure(folder: Path) -> None:
    """Run a training whose rank 3 fails, on a terminal, and draw what the terminal shows."""
    from rich.console import Console
    from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
    from rich.text import Text

    command = ["dsl", "--num_gpus", "4", "train.py"]
    code, said = _on_a_terminal(command)
    shown = f"$ {' '.join(command)}\n{said}$ echo $?\n{code}\n"
    for scheme, theme in (("light", DEFAULT_TERMINAL_THEME), ("dark", SVG_EXPORT_THEME)):
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
        console.print(Text.from_ansi(shown))
        drawn = console.export_svg(title="dsl", theme=theme, unique_id=f"failure-{scheme}")
        # The fonts that it names come from another host; on a white page, only the frame shows where it ends.
        drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
        drawn = drawn.replace('stroke="rgba(255,255,255,0.35)"', 'stroke="#888888"')
        (folder / f"verdict-{scheme}.svg").write_text(drawn, encoding="utf-8")


def _on_a_terminal(command: list[str]) -> tuple[int, str]:
    """Exit code of a command in a directory with the training, and what it wrote to its terminal."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(TRAINING)
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
        scripts = sysconfig.get_path("scripts")
        env = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "TERM": "xterm-256color"}
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        said = b""
        while chunk := _read(ours):
            said += chunk
        os.close(ours)
        # Where this machine keeps its temporary files is not the reader's business.
        return process.wait(), said.decode().replace("\r\n", "\n").replace(f"{folder}/", "")


def _read(terminal: int) -> bytes:
    """More of what was written; nothing once no process has the terminal open."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def draw_charts(folder: Path) -> None:
    """Put what the last benches measured into the table of docs/pictures, and draw its charts."""
    table: charts.Table = json.loads(FIGURES.read_text(encoding="utf-8"))
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        bars = [Bars(*row["bars"]) for row in results["rows"] if row.get("bars")]
        for chart, groups in charts.table(bars, results["machine"]).items():
            table.setdefault(chart, {}).update(groups)
        FIGURES.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    charts.draw(table, folder)


def write_tables() -> None:
    """Put what the last benches measured into the rows of docs/pictures, and these into the pages."""
    if RESULTS.exists():
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        new = [tables.measured(row["bench"], row, results["machine"]) for row in results["rows"]]
        tables.save(tables.merged(tables.load(), new))
    tables.write_pages()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="draw the pictures of the documents")
    parser.add_argument("--diagrams", metavar="FOLDER", type=Path, help="only the diagrams, into this folder")
    only = parser.parse_args().diagrams
    draw_diagrams(only or PICTURES)
    if only is None:
        record_failure(PICTURES)
        draw_charts(PICTURES)
        write_tables()


if __name__ == "__main__":
    main()
