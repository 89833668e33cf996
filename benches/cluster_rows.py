"""Several hosts in namespaces of this machine, as root: start against others, and failure to end."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from benches.measure import Bars, Row, failed, in_turns, medians, spread
from tests.kit.cluster import MPI, Cluster, Slurm, find_mpi
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benches.programs import Programs

WORD = "here"
# Each worker says it and ends. With --no_python and the like there is no interpreter in the way.
WORKER = ("/bin/echo", WORD)
NO_PYTHON = ("--no_python", "--no_local_rank")
PORT = "29500"
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
# What a user of a machine without devices sets, so that nobody looks for any.
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
LIMIT_S = 600.0
LEFT_S = 5.0
SETTLE_S = 0.5
"""After the start of the workers: the launchers have nothing left to do then."""


def start(programs: Programs, scripts: Path, hosts: int, workers: int, repeats: int) -> list[Row]:
    """From the start of the command on the first host to the first line of a worker on its stdout."""
    with Cluster(hosts) as cluster:
        hostfile = _hostfile(cluster, workers)
        commands = {
            "dsl": [programs.dsl, "--launcher", "ssh", *_with_hostfile(hostfile)],
            "pdsh + torchrun": _pdsh_torchrun(scripts, cluster.names, workers),
            "deepspeed": [str(scripts / "deepspeed"), "--launcher", "pdsh", *_with_hostfile(hostfile)],
        }
        values = in_turns(
            {
                name: lambda words=words: _first_line_s(cluster, scripts, words, hosts * workers)  # type: ignore[misc]
                for name, words in commands.items()
            },
            repeats,
            slow={"pdsh + torchrun": max(2, repeats // 3), "deepspeed": max(2, repeats // 3)},
        )
    middle = medians(values)
    rows = []
    for name, bar in (("pdsh + torchrun", 3.0), ("deepspeed", 5.0)):
        detail = f"{spread(values[name], 1, 's')} against {spread(values['dsl'], 1, 's')}"
        what = f"{hosts} hosts x {workers}, start to first line, {name} / dsl"
        bars = Bars("hosts", f"{hosts} hosts with {workers} workers each", middle)
        rows.append(Row(what, middle[name] / middle["dsl"], "x", bar, False, detail, bars))
    return rows


def _hostfile(cluster: Cluster, workers: int) -> Path:
    path = cluster.home / "hosts"
    path.write_text("".join(f"{name} slots={workers}\n" for name in cluster.names))
    return path


def _with_hostfile(hostfile: Path) -> list[str]:
    return ["--hostfile", str(hostfile), *NO_PYTHON, *WORKER]


def _pdsh_torchrun(scripts: Path, names: Sequence[str], workers: int) -> list[str]:
    torchrun = [
        str(scripts / "torchrun"), "--nnodes", str(len(names)), "--node-rank", "%n",
        "--nproc-per-node", str(workers), "--master-addr", names[0], "--master-port", PORT, "--no-python",
    ]  # fmt: skip
    return ["pdsh", "-S", "-R", "ssh", "-f", "1024", "-w", ",".join(names), *torchrun, *WORKER]


def _first_line_s(cluster: Cluster, scripts: Path, command: Sequence[str], lines: int) -> float:
    """Seconds until a worker's first line has come home.

    Raises:
        RuntimeError: the command failed, or lines are missing.
    """
    environ = {**ENVIRONMENT, "PATH": f"{scripts}:{cluster[0].environment()['PATH']}"}
    first_s = 0.0
    count = 0
    with tempfile.TemporaryFile() as errors:
        begin = time.monotonic()
        with cluster[0].start(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if _is_of_a_worker(line):
                    first_s = first_s or time.monotonic() - begin
                    count += 1
            code = process.wait(LIMIT_S)
        if code != 0 or count != lines:
            errors.seek(0)
            text = errors.read().decode(errors="replace")[-800:]
            raise RuntimeError(f"{' '.join(command)[:200]} ended with {code} after {count} lines: {text}")
    return first_s


def _is_of_a_worker(line: bytes) -> bool:
    """Not of a launcher that shows its command; pdsh puts the host before each line."""
    words = line.split()
    return words[-1:] == [WORD.encode()] and len(words) <= 2


class Transport(NamedTuple):
    """A launcher as it is installed on the hosts."""

    launcher: str
    env: Mapping[str, str]


def _transports(cluster: Cluster) -> dict[str, Transport]:
    """All of them, by their names and versions."""
    Slurm(cluster).up()
    found = {name: Transport(name, {}) for name in ("ssh", "pdsh", "slurm")}
    for name in MPI:
        mpi = find_mpi(cluster, name)
        found[name] = Transport(mpi.launcher, mpi.env)
    return found


def failure(programs: Programs, hosts: int, repeats: int) -> list[Row]:
    """The last rank fails: until the command has ended, and nothing of the job is left on any host."""
    rows = []
    with Cluster(hosts) as cluster:
        hostfile = _hostfile(cluster, 2)
        takers = {
            name: lambda transport=transport: _failure_s(programs, cluster, hostfile, transport)
            for name, transport in _transports(cluster).items()
        }
        for launcher, taken in in_turns(takers, repeats).items():
            name = f"{hosts} hosts x 2, {launcher}, a worker fails to end"
            rows.append(Row(name, statistics.median(taken), "s", 1.0, True, spread(taken, 1, "s")))
    return rows


def _failure_s(programs: Programs, cluster: Cluster, hostfile: Path, transport: Transport) -> float:
    """Seconds from the failure of a worker to the end of the command. Raises RuntimeError for a wrong end."""
    last = 2 * len(cluster) - 1
    with tempfile.TemporaryDirectory(dir=cluster.home) as directory, tempfile.TemporaryFile() as errors:
        child, folder = programs.testchild, Path(directory)
        script = (
            f'if [ "$RANK" = {last} ]; then exec {child} note {folder}/ready %r wait {folder}/go '
            f"stamp {folder}/failed exit 42; fi; exec {child} note {folder}/ready %r pause"
        )
        command = [programs.dsl, "--launcher", transport.launcher, "--hostfile", str(hostfile), *NO_PYTHON]
        env = {**ENVIRONMENT, **transport.env}
        with cluster[0].start(
            [*command, "/bin/sh", "-c", script], env=env, stdin=subprocess.DEVNULL, stderr=errors
        ) as process:
            until(lambda: _lines(folder / "ready") > last or process.poll() is not None, LIMIT_S)
            time.sleep(SETTLE_S)
            (folder / "go").touch()
            code = process.wait()  # with a timeout it would sleep and look, up to 50 ms apart
            end_ns = time.monotonic_ns()
        if code != 42:
            errors.seek(0)
            raise RuntimeError(
                f"{transport.launcher} ended with {code}: {errors.read().decode(errors='replace')[-800:]}"
            )
        until(lambda: not cluster.leftovers(), LEFT_S)
        return (end_ns - int((folder / "failed").read_text())) / 1e9


def _lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def fixed_nodes(programs: Programs, hosts: int, repeats: int) -> Row:
    """`dslrun --node-rank` on each host: from the death of the last rank to the last stop on the others."""
    with Cluster(hosts) as cluster:
        taken = [_last_stop_ms(programs, cluster) for _ in range(repeats)]
    name = f"{hosts} hosts, dslrun --node-rank, a worker fails to the last stop elsewhere"
    return Row(name, statistics.median(taken), "ms", 60.0, True, spread(taken, 1, "ms"))


def _last_stop_ms(programs: Programs, cluster: Cluster) -> float:
    last = len(cluster) - 1
    with tempfile.TemporaryDirectory(dir=cluster.home) as directory, ExitStack() as stack:
        folder = Path(directory)
        failing = f"note {folder}/ready %r wait {folder}/go stamp {folder}/failed exit 42"
        stopped = f"catch TERM trace {folder}/stop-%r note {folder}/ready %r await TERM 1"
        words = f"only {last} [ {failing} ] only !{last} [ {stopped} ]"
        where = f"--nnodes={len(cluster)} --master-addr={cluster[0].name} --master-port={PORT} --no-python"
        for rank in reversed(range(len(cluster))):
            command = [
                programs.dslrun,
                *where.split(),
                f"--node-rank={rank}",
                programs.testchild,
                *words.split(),
            ]
            job = cluster[rank].start(
                command, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.enter_context(job)
            stack.callback(job.kill)
        until(lambda: _lines(folder / "ready") > last, LIMIT_S)
        time.sleep(SETTLE_S)
        (folder / "go").touch()
        traces = [folder / f"stop-{rank}" for rank in range(last)]
        until(lambda: all(map(_lines, traces)), LIMIT_S)
        stops = [int(trace.read_text().split()[3]) for trace in traces]
        return (max(stops) - int((folder / "failed").read_text())) / 1e6


def output(programs: Programs, against: Path | None, hosts: int, mib: int, repeats: int) -> list[Row]:
    """One worker a host writes so much, through the head into a tagged pipe and files: rate, processor time.

    `against` has the commands of another checkout: then both take turns, and the rows are ratios.
    """
    with Cluster(hosts) as cluster:
        hostfile = _hostfile(cluster, 1)
        commands = {"this": programs.dsl, **({"other": str(against / "dsl")} if against else {})}
        costs: dict[str, list[float]] = {name: [] for name in commands}

        def rate(name: str) -> float:
            mb_s, cpu_s = _flood(cluster, commands[name], hostfile, programs.testchild, mib)
            costs[name].append(cpu_s)
            return mb_s

        rates = in_turns({name: partial(rate, name) for name in commands}, repeats)
    costs = {name: values[1:] for name, values in costs.items()}  # as `in_turns` does
    fast, cheap = medians(rates), medians(costs)
    said = ", ".join(
        f"{name}: {spread(rates[name], 1, 'MB/s')}, {spread(costs[name], 1, 's/GB')}" for name in commands
    )
    name = f"{hosts} hosts, output through the head"
    if against is None:
        return [
            Row(f"{name}, rate", fast["this"], "MB/s", 100.0, False, said),
            Row(f"{name}, processor of the head", cheap["this"], "s/GB", 8.0, True, said),
        ]
    return [
        Row(f"{name}, rate, this / other", fast["this"] / fast["other"], "x", 3.0, False, said),
        Row(
            f"{name}, processor of the head, this / other",
            cheap["this"] / cheap["other"],
            "x",
            1 / 3,
            True,
            said,
        ),
    ]


def _flood(cluster: Cluster, dsl: str, hostfile: Path, child: str, mib: int) -> tuple[float, float]:
    """MB/s of a job, and the head's seconds of processor for a GB. Raises RuntimeError for a wrong end."""
    with tempfile.TemporaryDirectory(dir=cluster.home) as logs, tempfile.TemporaryFile() as errors:
        words = [dsl, "--hostfile", str(hostfile), "--tag-output", "always", "--log-dir", logs, *NO_PYTHON]
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        with cluster[0].start(
            [*words, child, "flood", str(mib), "100", "4000"],
            env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        ) as process:  # fmt: skip
            subprocess.run(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL, check=True)
            code = process.wait(LIMIT_S)
        wall_s, after = time.monotonic() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        if code != 0:
            errors.seek(0)
            raise RuntimeError(f"{dsl} ended with {code}: {errors.read().decode(errors='replace')[-800:]}")
    mb = len(cluster) * mib * 1.048576
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return mb / wall_s, cpu_s / mb * 1000


def _steps(count: int) -> Iterator[str]:
    """Lines as training scripts print them: a third of each are digits that nobody can foretell."""
    random = Random(1)
    for step in range(count):
        loss, norm, rate = 2 + random.random(), random.random(), random.randint(30_000, 45_000)
        yield (
            f"[rank {step % 8}] step {step:6}/50000 | loss {loss:.6f} | grad_norm {norm:.4f} | "
            f"tokens/s {rate} | mem 61.2 GiB\n"
        )


def _channels(count: int) -> Iterator[str]:
    """Lines as NCCL prints them at its start."""
    for step in range(count):
        here, there = step % 128, step * 7 % 128
        yield (
            f"node{step % 16}:{1234 + step % 8}:{1300 + step % 8} [{step % 8}] NCCL INFO Channel "
            f"{step % 32:02}/0 : {here}[{here % 8}] -> {there}[{there % 8}] via P2P/CUMEM\n"
        )


LINES: dict[str, Callable[[int], Iterator[str]]] = {"NCCL's lines": _channels, "lines of steps": _steps}


def output_against_ssh(dsl: str, hosts: int, mib: int, repeats: int, kind: str) -> Row:
    """One worker a host writes lines of a `kind` to a file, against as many `ssh`: without start and end."""
    with Cluster(hosts + 1) as cluster, tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        away = cluster.names[1:]
        hostfile = cluster.home / "hosts"
        hostfile.write_text("".join(f"{name} slots=1\n" for name in away))
        text = cluster.home / "output"
        with text.open("wb") as file:
            size = 0
            block = "".join(LINES[kind](20_000)).encode()
            while size < mib << 20:
                size += file.write(block)
        through = [dsl, "--hostfile", str(hostfile), "--launcher", "ssh", *NO_PYTHON]
        side_by_side = 'for host in $HOSTS; do ssh "$host" "$@" & done; wait'
        commands = {"dsl": through, "ssh": ["/bin/sh", "-c", side_by_side, "sh"]}
        full, empty = ["cat", str(text)], ["/bin/true"]
        runs = {
            f"{name} {size}": partial(
                _spent_s, cluster, [*command, *program], {**ENVIRONMENT, "HOSTS": " ".join(away)}, directory
            )
            for name, command in commands.items()
            for size, program in (("full", full), ("empty", empty))
        }
        spent: dict[str, list[float]] = {name: [] for name in runs}

        def wall(name: str) -> float:
            wall_s, cpu_s = runs[name]()
            spent[name].append(cpu_s)
            return wall_s

        taken = medians(in_turns({name: partial(wall, name) for name in runs}, repeats))
    busy = medians({name: values[1:] for name, values in spent.items()})  # as `in_turns` does
    mb = hosts * size / 1e6
    rates = {name: mb / max(taken[f"{name} full"] - taken[f"{name} empty"], 1e-3) for name in commands}
    costs = {name: 1000 * (busy[f"{name} full"] - busy[f"{name} empty"]) / mb for name in commands}
    said = ", ".join(f"{name}: {rates[name]:.0f} MB/s, {costs[name]:.2f} s/GB" for name in commands)
    name = f"{hosts} hosts, output through the head, {kind}, dsl / ssh, marginal"
    return Row(name, rates["dsl"] / rates["ssh"], "x", 0.9, False, f"{said} of all processors together")


def _spent_s(
    cluster: Cluster, command: Sequence[str], env: Mapping[str, str], directory: str
) -> tuple[float, float]:
    """Seconds of a command whose output goes to a file, and of the processors of all hosts.

    Raises:
        RuntimeError: the command failed.
    """
    with tempfile.TemporaryFile(dir=directory) as out, tempfile.TemporaryFile() as errors:
        before, begin = _processors_s(cluster), time.monotonic()
        with cluster[0].start(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=errors
        ) as process:
            code = process.wait()  # with a timeout it would sleep and look, up to 50 ms apart
        wall_s, busy_s = time.monotonic() - begin, _processors_s(cluster) - before
        if code != 0:
            errors.seek(0)
            raise failed(command, code, errors.read())
    return wall_s, busy_s


def _processors_s(cluster: Cluster) -> float:
    """Seconds of processor that the cluster has used; 0 without cgroups."""
    if cluster[0].cgroup is None:
        return 0.0
    stat = (cluster[0].cgroup.parent / "cpu.stat").read_text().split()
    return int(stat[stat.index("usage_usec") + 1]) / 1e6
