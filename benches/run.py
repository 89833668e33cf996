"""The benches: every number that the project promises, measured on this machine.

Compares with torchrun, deepspeed and the floor (Python's own start plus a bare posix_spawn loop), in turns,
and prints a table. Table and JSON go to ``bench-results/``. Ends with 1 if a value misses its bar.

    python benches/run.py            everything, about ten minutes on two cores, twenty as root
    python benches/run.py --quick    fewer repeats
    python benches/run.py --only start    what a launch costs, half a minute
    python benches/run.py --only page     the rows of docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # started as a file, not with -m
    sys.path.insert(0, str(ROOT))

from benches import (  # noqa: E402  needs the path above
    autotuning_rows,
    charts,
    cluster_rows,
    control_rows,
    elastic_rows,
    engine_rows,
    forkserver_rows,
    hang_rows,
    launch_rows,
    log_rows,
    scale_rows,
    start_rows,
    straggler_rows,
    torchrun_rows,
    view_rows,
    warm_rows,
)
from benches.measure import Row, machine  # noqa: E402  as above
from benches.programs import peers, programs  # noqa: E402  as above
from tests.kit.cluster import packages  # noqa: E402  as above

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.programs import Programs


PAGE = ("torchrun", "logs", "forkserver-warm-training")
"""The benches whose rows docs/benchmarks.md shows."""


def _benches(options: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    ours = programs()
    few, many = (3, 5) if options.quick else (7, 15)
    idle_s = 10.0 if options.quick else 60.0
    return {
        "peers": lambda: launch_rows.against_peers(ours, peers(options.peers), many),
        "torchrun": lambda: _torchrun(ours, peers(options.peers), quick=options.quick),
        # Commands of some ten milliseconds: turns are cheap, and many are needed.
        "start": lambda: [
            *start_rows.against_python(ours, 3 * many),
            *start_rows.against_mpirun(ours, 2 * many),
            *start_rows.against_floor(ours, *start_rows.FLOOR_64, 2 * many),
        ],
        "floor": lambda: [
            row for each in start_rows.FLOORS for row in start_rows.against_floor(ours, *each, few)
        ],
        # Two commands that differ this little take many turns to tell apart.
        "bound": lambda: launch_rows.bound(ours, 15 if options.quick else 45),
        "first": lambda: [launch_rows.first_exec(ours, many)],
        "fat": lambda: [engine_rows.fat_parent(few)],
        "growth": lambda: [engine_rows.cpu_growth(ours, few)],
        "detect": lambda: [engine_rows.detection(ours, 50 if options.quick else 200)],
        "fail": lambda: [launch_rows.failure_to_end(ours, 1000, few)],
        "idle": lambda: scale_rows.idle(ours, 1000, idle_s),
        "thousands": lambda: scale_rows.thousands(ours, 4000),
        "logs": lambda: [
            log_rows.throughput(ours, 64, 16, 800.0, few),
            log_rows.throughput(ours, 1000, 1, 450.0, few),
            log_rows.against_torchrun(ours, peers(options.peers), 3),
            *log_rows.against_taggers(ours, 3),
            log_rows.direct(ours),
            log_rows.detection(ours, 50 if options.quick else 200),
        ],
        "hang-watch": lambda: [hang_rows.false_alarms(ours, 20, 12.0 if options.quick else 30.0, 5)],
        "top": lambda: view_rows.top(ours, 4, 256, 10 if options.quick else 30),
        "stragglers": lambda: _stragglers(ours, quick=options.quick),
        "lines": lambda: [log_rows.every_line(ours, 200, 1_000_000 if options.quick else 10_000_000)],
        "pipes": lambda: log_rows.ordinary_user(ours, 4000),
        "control": lambda: [
            *control_rows.agents((10, 100, 1000), 5 if options.quick else 15, idle_s),
            *control_rows.output(2, 1_000_000 if options.quick else 10_000_000),
        ],
        "elastic": lambda: _elastic(ours, peers(options.peers), quick=options.quick),
        **_forkserver(ours, quick=options.quick),
        "autotuning": lambda: [
            autotuning_rows.example(ours, few),
            autotuning_rows.cost(ours, 40, 150.0, few),
        ],
        "autotuning-forked": lambda: _forked(ours, few),
        **_hosts(ours, options),
    }


def _forkserver(ours: Programs, *, quick: bool) -> dict[str, Callable[[], list[Row]]]:
    """One bench a row, a minute or two each: they load all CPUs."""
    few, times = (2, 20) if quick else (3, 200)
    rows: dict[str, Callable[[], Row]] = {
        "16": lambda: forkserver_rows.imports(ours, 16, 8.0, few, 1),
        "64": lambda: forkserver_rows.imports(ours, 64, 30.0, few, 1),
        "end": lambda: forkserver_rows.whole(ours, 64, 25.0, few, 1),
        "end-cost": lambda: forkserver_rows.worker_cost(ours, 64, 50.0, few),
        "512": lambda: forkserver_rows.against_floor(ours, 512, 1.5, few),
        "training": lambda: forkserver_rows.training(ours, 8.0, few, few),
        "training-floor": lambda: forkserver_rows.training_floor(ours, 1.2, few),
        "memory": lambda: forkserver_rows.memory(ours, 64, 0.35),
        "same": lambda: forkserver_rows.tests("proc/test_fork_conformance.py", "observes", 0),
        "frameworks": lambda: forkserver_rows.tests("frameworks/test_frameworks.py", "", 0),
        "poison": lambda: forkserver_rows.poison(ours, times, 0),
        "restart": lambda: forkserver_rows.restart(ours, 64, 0.4, few),
        "warm-training": lambda: warm_rows.training(ours, 4, 15.0, 2 * few, 2 * few),
        "warm-single": lambda: warm_rows.single(ours, 5.0, few),
        "warm-functions": lambda: warm_rows.functions(4, 0.3, 5 * few),
        "warm-64": lambda: warm_rows.starts(ours, 64, 0.35, few),
    }

    def take(row: Callable[[], Row]) -> list[Row]:
        if forkserver_rows.has_torch():
            return [row()]
        print("no fork servers were measured: torch is not installed beside dslrun", file=sys.stderr)
        return []

    return {f"forkserver-{name}": partial(take, row) for name, row in rows.items()}


def _forked(ours: Programs, repeats: int) -> list[Row]:
    if forkserver_rows.has_torch():
        return autotuning_rows.forked(ours, 40, 100.0, 5.0, repeats)
    print("no forked experiments were measured: torch is not installed beside dsl", file=sys.stderr)
    return []


def _stragglers(ours: Programs, *, quick: bool) -> list[Row]:
    if not forkserver_rows.has_torch():
        print("no slow ranks were looked for: torch is not installed beside dslrun", file=sys.stderr)
        return []
    return [
        *straggler_rows.named(ours, 4),
        *([] if quick else straggler_rows.named(ours, 16)),
        straggler_rows.even(ours, 4, 2 if quick else 10),
        straggler_rows.slowdown(ours, 4, 2 if quick else 6),
    ]


def _hosts(ours: Programs, options: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    few, many, mib = (2, 3, 32) if options.quick else (5, 9, 256)
    against: Path | None = options.against
    rows: dict[str, Callable[[], list[Row]]] = {
        "start": lambda: cluster_rows.start(ours, peers(options.peers), 16, 4, many),
        "failure": lambda: [*cluster_rows.failure(ours, 3, few), *cluster_rows.failure(ours, 16, few)],
        "fixed": lambda: [cluster_rows.fixed_nodes(ours, 3, 5 if options.quick else 20)],
        "output": lambda: [
            *cluster_rows.output(ours, against, 2, mib, few),
            *cluster_rows.output(ours, against, 16, mib // 8, few),
        ],
        "ssh": lambda: [
            cluster_rows.output_against_ssh(ours.dsl, hosts, mib * 2 // hosts, few, kind)
            for kind in cluster_rows.LINES
            for hosts in (2, 16)
        ],
    }

    def take(row: Callable[[], list[Row]]) -> list[Row]:
        if os.geteuid() != 0:
            print("no hosts were made: that takes root", file=sys.stderr)
            return []
        try:
            packages.prepare()
        except packages.Missing as missing:
            print(f"no hosts were made: {missing}", file=sys.stderr)
            return []
        return row()

    return {f"hosts-{name}": partial(take, row) for name, row in rows.items()}


def _torchrun(ours: Programs, theirs: Path, *, quick: bool) -> list[Row]:
    few, many = (3, 5) if quick else (6, 12)
    rows = [
        torchrun_rows.launches(ours, theirs, workers, bar, many)
        for workers, bar in ((1, 25.0), (16, 25.0), (64, 25.0), (512, 5.0))
    ]
    rows.append(torchrun_rows.restart(ours, theirs, 64, few))
    rows.extend(
        torchrun_rows.failure_to_end(ours, theirs, workers, bar, few)
        for workers, bar in ((1, 10.0), (16, 10.0), (64, 10.0), (512, 3.0))
    )
    rows.append(torchrun_rows.stubborn(ours, theirs, 3))
    rows.extend(torchrun_rows.blame(ours, theirs, delay_ms, 50, 3 if quick else 6) for delay_ms in (1, 40))
    return rows


def _elastic(ours: Programs, theirs: Path, *, quick: bool) -> list[Row]:
    # Each takes seconds, and a torchrun that does not come up a minute.
    our_runs, their_runs = (5, 3) if quick else (100, 10)
    return [
        elastic_rows.next_attempt(ours, theirs, 4, 4 if quick else 9),
        elastic_rows.restarts(ours, theirs, 1, our_runs, their_runs),
        elastic_rows.restarts(ours, theirs, 2, our_runs // 2, their_runs),
    ]


def _line(row: Row) -> str:
    sign = "<=" if row.at_most else ">="
    verdict = "PASS" if row.passed else "FAIL"
    bar = f"{sign} {row.bar:g} {row.unit}".rstrip()
    return f"| {row.name} | {row.value:.3g} {row.unit} | {bar} | {verdict} | {row.detail} |"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="measure dsl against torchrun, deepspeed and the bare kernel"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", metavar="NAMES", help="comma list of benches to run")
    parser.add_argument("--peers", metavar="DIR", help="environment that holds torchrun and deepspeed")
    parser.add_argument(
        "--against",
        metavar="DIR",
        type=Path,
        help="commands of another checkout, in turns with these (hosts-output)",
    )
    parser.add_argument("--list", action="store_true", help="names of the benches")
    return parser.parse_args()


def main() -> int:
    """Run the benches and write the results."""
    options = _options()
    benches = _benches(options)
    if options.list:
        print("\n".join(benches))
        return 0
    asked = options.only.split(",") if options.only else list(benches)
    asked = [name for one in asked for name in (PAGE if one == "page" else (one,))]
    # `forkserver` stands for all whose names begin so, as `hosts` does.
    meant = {one: [name for name in benches if name == one or name.startswith(f"{one}-")] for one in asked}
    chosen = [name for names in meant.values() for name in names]
    if unknown := {one for one, names in meant.items() if not names}:
        print(
            f"no such bench: {', '.join(sorted(unknown))} (choose from {', '.join(benches)})", file=sys.stderr
        )
        return 2
    # Installed commands have their bytecode; where none may be written they would compile at every start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    facts = machine()
    lines = ["| measure | value | bar | | detail |", "| --- | --- | --- | --- | --- |"]
    print("\n".join([", ".join(f"{name} {fact}" for name, fact in facts.items()), *lines]), flush=True)
    rows: list[tuple[str, Row]] = []
    for name in chosen:
        for row in benches[name]():
            rows.append((name, row))
            lines.append(_line(row))
            print(lines[-1], flush=True)
        _write(facts, rows, lines)  # each time: a bench may fail, or be interrupted
    return 0 if all(row.passed for _, row in rows) else 1


def _write(facts: dict[str, str | int | float], rows: list[tuple[str, Row]], lines: list[str]) -> None:
    directory = ROOT / "bench-results"
    directory.mkdir(exist_ok=True)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    results = [{"bench": name, **row._asdict(), "passed": row.passed} for name, row in rows]
    report = {"time": stamp, "machine": facts, "rows": results}
    (directory / "bench.json").write_text(json.dumps(report, indent=1) + "\n")
    (directory / "bench.md").write_text("\n".join(lines) + "\n")
    charts.draw(charts.table([row.bars for _, row in rows if row.bars], facts), directory)


if __name__ == "__main__":
    sys.exit(main())
