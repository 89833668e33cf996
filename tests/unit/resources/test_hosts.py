"""The hosts of a job: those of a hostfile, or that a scheduler has given.

What lists of nodes mean was asked of `scontrol show hostnames` 22.05.
"""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.outcome import assert_one_line, error_of

from dsl.errors import HostfileError
from dsl.resources.hosts import Allocation, expand_counts, expand_nodes, find_allocation, parse_hostfile
from dsl.words import MOST_WORKERS


def _find(environ: dict[str, str], files: dict[str, str] | None = None) -> Allocation | None:
    return find_allocation(environ, (files or {}).get)


def _hosts(environ: dict[str, str], files: dict[str, str] | None = None) -> dict[str, int]:
    found = _find(environ, files)
    return dict(found.hosts) if found else {}


@pytest.mark.parametrize(
    "text, names",
    [
        ("a", "a"),
        ("a,b,c", "a b c"),
        ("a[1-3]", "a1 a2 a3"),
        ("a[01-03,5],b", "a01 a02 a03 a5 b"),
        ("a[9-11]", "a9 a10 a11"),
        ("a[001-3]", "a001 a002 a003"),
        ("a[08-9]", "a08 a09"),
        ("x[0-1][2-3]", "x02 x03 x12 x13"),
        ("a[1-2]-[5-6]", "a1-5 a1-6 a2-5 a2-6"),
        ("[1-3]", "1 2 3"),
        ("a[0]", "a0"),
        # Later versions have these.
        ("r[0-1]n[08-10]-ib", "r0n08-ib r0n09-ib r0n10-ib r1n08-ib r1n09-ib r1n10-ib"),
        ("a-b.c[0-1].d,e", "a-b.c0.d a-b.c1.d e"),
    ],
)
def test_a_list_of_nodes(text: str, names: str) -> None:
    assert expand_nodes(text) == names.split()


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "text, problem",
    [
        ("a[3-1]", "'3-1' is no range"),
        ("a[1", "brackets do not match"),
        ("a]", "brackets do not match"),
        ("a[1[2]]", "brackets do not match"),
        ("a[]", "'' is no range"),
        ("a[x]", "'x' is no range"),
        ("a[1-2-3]", "'1-2-3' is no range"),
        ("a,,b", "twice, or none"),
        ("a[1-2],a2", "twice, or none"),
        ("a[0-65536]", "more than 65536 hosts"),
        ("a[0-999999999]", "more than 65536 hosts"),
        ("a[0-999][0-999]", "more than 65536 hosts"),
    ],
)
def test_a_list_that_is_none(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        expand_nodes(text)
    with pytest.raises(HostfileError, match=r"^SLURM_JOB_NODELIST='.*; name the hosts with --hostfile$"):
        _find({"SLURM_JOB_NODELIST": text})


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 9)), min_size=1, max_size=5))
def test_ranges_of_any_width(ranges: list[tuple[int, int]]) -> None:
    """Each range has a prefix of its own, so that no host comes twice."""
    text = ",".join([f"{chr(97 + at)}[{low:03}-{low + more:03}]" for at, (low, more) in enumerate(ranges)])
    expected = [
        f"{chr(97 + at)}{number:03}"
        for at, (low, more) in enumerate(ranges)
        for number in range(low, low + more + 1)
    ]
    assert expand_nodes(text) == expected


@given(st.text("a[]-,019 x"))
def test_any_text_is_a_list_or_is_refused(text: str) -> None:
    try:
        names = expand_nodes(text)
    except ValueError:
        return
    assert all(names)
    assert not set("".join(names)) & set("[],")


@pytest.mark.parametrize(
    "text, counts",
    [
        ("2", [2]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("1,2(x2)", [1, 2, 2]),
        ("2(x5)", []),
        ("x", []),
        ("", []),
        ("2(x", []),
        ("2(xy)", []),
        ("99999999", []),
    ],
)
def test_counts_of_tasks(text: str, counts: list[int]) -> None:
    assert expand_counts(text, 4) == counts


SLURM = {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "12"}


@pytest.mark.parametrize(
    "environ, slots",
    [
        ({}, (1, 1)),
        ({"SLURM_TASKS_PER_NODE": "2(x2)"}, (2, 2)),
        ({"SLURM_TASKS_PER_NODE": "3,1"}, (3, 1)),
        ({"SLURM_TASKS_PER_NODE": "3"}, (1, 1)),
        ({"SLURM_TASKS_PER_NODE": "3,1", "SLURM_NTASKS_PER_NODE": "2"}, (2, 2)),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "8"}, (8, 8)),
        ({"SLURM_GPUS_PER_NODE": "4", "SLURM_GPUS_ON_NODE": "8"}, (4, 4)),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, (4, 4)),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, (3, 3)),
        ({"SLURM_GPUS_PER_TASK": "2", "SLURM_GPUS_ON_NODE": "6", "SLURM_TASKS_PER_NODE": "3,1"}, (6, 2)),
        ({"SLURM_GPUS_PER_TASK": "a100:1", "SLURM_NTASKS_PER_NODE": "2"}, (2, 2)),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_NTASKS_PER_NODE": "2"}, (2, 2)),
        ({"SLURM_GPUS_ON_NODE": "many"}, (1, 1)),
    ],
)
def test_slots_of_slurm(environ: dict[str, str], slots: tuple[int, int]) -> None:
    """Devices where they are counted, else tasks, else one."""
    found = _find({**SLURM, **environ})
    assert found is not None
    assert (found.scheduler, found.name) == ("slurm", "Slurm job 12")
    assert found.hosts == tuple(zip(("a1", "a2"), slots, strict=True))
    assert found.counts_devices or found.tasks == slots
    counts = [value for name, value in environ.items() if "GPUS" in name]
    assert found.counts_devices == bool(set(counts) - {"0", "many"})


# Answers of scontrol 22.05 for jobs that have asked for a total of GPUs. The last is written by hand: GPUs with types.
SHARED = {
    "4": """   NodeList=a[1-2]
     Nodes=a1 CPU_IDs=6-7 Mem=0 GRES=gpu:3(IDX:0-2)
     Nodes=a2 CPU_IDs=6-7 Mem=0 GRES=gpu:1(IDX:0)
""",
    "2": "     Nodes=a[1-2] CPU_IDs=5-6 Mem=0 GRES=gpu:1(IDX:1)\n",
    "6": """     Nodes=a1 CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0,3),gpu:v100:1(IDX:2),shard:1(0/8)
     Nodes=a2 CPU_IDs=0-1 Mem=0 GRES=gpu:a100:3(IDX:0-2)
""",
}


@pytest.mark.parametrize(
    "total, answer, counts",
    [
        ("4", SHARED["4"], (3, 1)),
        ("2", SHARED["2"], (1, 1)),
        ("6", SHARED["6"], (3, 3)),
        ("5", SHARED["4"], None),
        ("4", "GRES=gpu:x(IDX:0) Nodes=a1", None),
        ("4", "GRES=gpu:4(IDX:0-3) Nodes=b1", None),
        ("4", None, None),
    ],
)
def test_how_slurm_shares_a_total_of_devices_is_asked_of_scontrol(
    total: str, answer: str | None, counts: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        assert words == ("scontrol", "show", "job", "--details", "12")
        if answer is None:
            raise FileNotFoundError
        return subprocess.CompletedProcess(words, 0, answer)

    monkeypatch.setattr(subprocess, "run", run)
    environ = {**SLURM, "SLURM_GPUS": total, "SLURM_GPUS_ON_NODE": "3"}
    if counts is None:
        with pytest.raises(HostfileError, match=f"{total} GPUs are shared among 2 hosts: ask Slurm for"):
            _hosts(environ)
    else:
        assert tuple(_hosts(environ).values()) == counts
    assert _hosts({**environ, "SLURM_GPUS_PER_NODE": "2"}) == {"a1": 2, "a2": 2}
    assert _hosts({**environ, "SLURM_JOB_NODELIST": "a1"}) == {"a1": int(total)}


@pytest.mark.parametrize(
    "environ, hosts",
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}, {}),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "a2"}, {"a2": 1}),
        ({"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "a1"}, None),
        ({"SLURM_STEP_ID": "4294967291"}, None),
        ({"SLURM_STEP_ID": "x"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}),
        ({"PMI_SIZE": "2"}, {}),
        ({"PMI_SIZE": "1"}, None),
        ({"DSL_JOB_ID": "j"}, {}),
    ],
)  # fmt: skip
def test_who_leads_a_job(environ: dict[str, str], hosts: dict[str, int] | None) -> None:
    """One of several tasks does not; a step has its own hosts; a shell in the allocation has all of them."""
    assert _hosts({**SLURM, **environ}) == ({"a1": 1, "a2": 1} if hosts is None else hosts)


@pytest.mark.parametrize(
    "environ, files, name, hosts",
    [
        ({"PBS_NODEFILE": "F", "PBS_JOBID": "7.srv"}, {"F": "a\na\nb\n\n"}, "PBS job 7.srv", {"a": 2, "b": 1}),
        ({"PBS_NODEFILE": "gone"}, {}, "", {}),
        ({"LSB_MCPU_HOSTS": "a 2 b 3", "LSB_JOBID": "7"}, {}, "LSF job 7", {"a": 2, "b": 3}),
        ({"LSB_MCPU_HOSTS": "a 0 b 3"}, {}, "LSF job", {"b": 3}),
        ({"LSB_DJOB_RANKFILE": "F", "LSB_HOSTS": "c"}, {"F": "a\nb\na\n"}, "LSF job", {"a": 2, "b": 1}),
        ({"LSB_HOSTS": "a b a", "LSB_MCPU_HOSTS": "a"}, {}, "LSF job", {"a": 2, "b": 1}),
        (
            {"PE_HOSTFILE": "F", "JOB_ID": "7"},
            {"F": "a 2 all.q@a <NULL>\nb 1 all.q@b UNDEFINED\nc\n"},
            "Grid Engine job 7",
            {"a": 2, "b": 1},
        ),
        ({}, {}, "", {}),
        ({"SLURM_JOB_NODELIST": ""}, {}, "", {}),
        ({"SLURM_NODELIST": "a", "SLURM_JOBID": "3"}, {}, "Slurm job 3", {"a": 1}),
    ],
)  # fmt: skip
def test_other_schedulers(
    environ: dict[str, str], files: dict[str, str], name: str, hosts: dict[str, int]
) -> None:
    found = _find(environ, files)
    assert (found.name if found else "", dict(found.hosts) if found else {}) == (name, hosts)
    assert found is None or not found.counts_devices


def test_a_file_of_hosts_that_cannot_be_read_is_an_error() -> None:
    def refuse(_path: str) -> str:
        raise PermissionError(13, os.strerror(13))

    with pytest.raises(
        HostfileError, match="PBS_NODEFILE=F cannot be read: permission denied; name the hosts"
    ):
        find_allocation({"PBS_NODEFILE": "F"}, refuse)


hosts = st.from_regex(r"[A-Za-z0-9_.@-][A-Za-z0-9_.@#=-]{0,12}", fullmatch=True)
pools = st.dictionaries(hosts, st.integers(0, 64), min_size=1, max_size=8)
padding = st.text(" \t", max_size=3)
noise = st.lists(st.sampled_from(["", "   ", "# a comment", "#h slots=1"]), max_size=2)


@given(pools, st.data())
def test_every_pool_survives_being_written_and_read(pool: dict[str, int], data: st.DataObject) -> None:
    lines = []
    for host, slots in pool.items():
        lines += data.draw(noise)
        gap = data.draw(st.text(" \t", min_size=1, max_size=3))
        rest = data.draw(st.sampled_from(["", " max_slots=8", " # note", "x"]))
        lines.append(f"{data.draw(padding)}{host}{gap}slots={slots}{rest}\n")
    assert list(parse_hostfile(lines).items()) == list(pool.items())


@pytest.mark.guarantee("G8")
@given(st.lists(st.one_of(st.text(), st.from_regex(r"\S+\s+slots=\d+"))))
def test_any_text_gives_a_pool_or_one_line_that_names_the_place(lines: list[str]) -> None:
    error = error_of(HostfileError, parse_hostfile, lines, "/etc/hosts.txt")
    if error:
        assert error.startswith("/etc/hosts.txt")
        assert_one_line(error)
    else:
        pool = parse_hostfile(lines)
        assert pool
        assert all(0 <= slots <= MOST_WORKERS for slots in pool.values())


@pytest.mark.parametrize(
    "lines, message",
    [
        (
            ["a slots=1", "", "a slots=2"],
            "H line 3: hostfile contains multiple entries for 'a', the first in line 1",
        ),
        (
            ["# x", "missingslots"],
            "H line 2: hostfile contains a bad entry: 'missingslots', expected 'HOST slots=N'",
        ),
        (["# x"], "H: hostfile is empty or not formatted correctly"),
        ([f"a slots={MOST_WORKERS + 1}"], f"H line 1: slots={MOST_WORKERS + 1} is more than the limit"),
        ([f"a slots={'9' * 6000}"], "H line 1: slots=9999"),
    ],
)
def test_an_error_says_where_and_what_is_expected(lines: list[str], message: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(lines, "H")
    assert str(caught.value).startswith(message)
