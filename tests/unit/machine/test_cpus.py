"""CPUs and NUMA nodes as the kernel describes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.machine import read_topology

from dsl.machine.kernel import Cpus, NumaNode, Topology, parse_kernel_list


@pytest.mark.parametrize(
    "text, numbers",
    [
        ("0-2,5\n", (0, 1, 2, 5)),
        ("\n", ()),
        ("", ()),
        ("7", (7,)),
        ("0-1,3-4", (0, 1, 3, 4)),
        ("0-31\n\0", tuple(range(32))),  # as Linux 5.15-rc1 writes it
        ("\n\0", ()),
    ],
)
def test_the_kernels_lists(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_kernel_list(text) == numbers


@pytest.mark.parametrize(
    "quota, most",
    [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1), ("9900000 100000", None)],
)
def test_the_quota_of_the_control_group_may_leave_fewer_cpus_than_the_mask(
    tmp_path: Path, quota: str, most: int | None
) -> None:
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/inner\n",
            "proc/self/mountinfo": "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/job/cpu.max": f"{quota}\n",
            "sys/fs/cgroup/job/inner/cpu.max": "max 100000\n",
        },
    )
    cpus = Cpus(root)
    assert cpus.room == (len(cpus.allowed) if most is None else most)


def _write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return str(root)


NODE = "sys/devices/system/node"
CPU = "sys/devices/system/cpu"


def test_numa_nodes_come_in_order_and_say_where_memory_may_be_used(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            f"{NODE}/node10/cpulist": "4-5\n",
            f"{NODE}/node2/cpulist": "2-3\n",
            f"{NODE}/node0/cpulist": "0-1\n",
            f"{NODE}/node1/cpulist": "\n",
            f"{NODE}/possible": "0-10\n",
            f"{NODE}/has_memory": "0-2\n",
            "proc/self/status": "Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t0-1,10\nThreads:\t1\n",
        },
    )
    assert Cpus(root).numa_nodes == (
        NumaNode(0, (0, 1)),
        NumaNode(1, ()),
        NumaNode(2, (2, 3), usable_memory=False),
        NumaNode(10, (4, 5), usable_memory=False),
    )


def test_a_kernel_that_does_not_say_knows_no_numa_nodes(tmp_path: Path) -> None:
    assert read_topology([0, 1], str(tmp_path)) == Topology((), ((0,), (1,)))


def test_memory_counts_as_usable_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    assert Cpus(_write(tmp_path, {f"{NODE}/node0/cpulist": "0\n"})).numa_nodes == (NumaNode(0, (0,)),)


def test_cores_are_the_thread_siblings_of_the_cpus_asked_for(tmp_path: Path) -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"}
    root = _write(
        tmp_path,
        {f"{CPU}/cpu{cpu}/topology/thread_siblings_list": f"{text}\n" for cpu, text in siblings.items()},
    )
    assert read_topology([0, 1, 4], root).cores == ((0, 4), (1, 5))


def test_a_kernel_without_the_deprecated_name_knows_cores_all_the_same(tmp_path: Path) -> None:
    root = _write(tmp_path, {f"{CPU}/cpu{cpu}/topology/core_cpus_list": "0-1\n" for cpu in range(2)})
    assert read_topology([0, 1], root).cores == ((0, 1),)


def test_packages_and_last_level_caches_are_told_once_each(tmp_path: Path) -> None:
    files = {}
    for cpu in range(8):
        half, quarter = cpu // 4 * 4, cpu // 2 * 2
        files[f"{CPU}/cpu{cpu}/topology/package_cpus_list"] = f"{half}-{half + 3}\n"
        for index, (level, kind, shared) in enumerate(
            [
                (1, "Data", f"{cpu}"),
                (3, "Unified", f"{quarter}-{quarter + 1}"),
                (2, "Unified", f"{cpu}"),
                (4, "Instruction", "0-7"),
            ]
        ):
            folder = f"{CPU}/cpu{cpu}/cache/index{index}"
            files |= {f"{folder}/type": f"{kind}\n", f"{folder}/level": f"{level}\n"}
            files[f"{folder}/shared_cpu_list"] = f"{shared}\n"
    root = _write(tmp_path, files)
    assert Cpus(root, [0, 1, 2, 5]).packages == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert Cpus(root, [0, 1, 2, 5]).caches == ((0, 1), (2, 3), (4, 5))


def test_old_kernels_have_another_name_for_the_cpus_of_a_package(tmp_path: Path) -> None:
    root = _write(tmp_path, {f"{CPU}/cpu{cpu}/topology/core_siblings_list": "0-1\n" for cpu in range(2)})
    assert Cpus(root, [1]).packages == ((0, 1),)


def test_this_machine_has_a_core_for_every_cpu_we_may_use_and_packages_and_caches_around_them() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cores = read_topology(allowed).cores
    assert set(allowed) <= {cpu for core in cores for cpu in core}
    for groups in (Cpus().packages, Cpus().caches):
        for group in groups:
            assert all(set(core) <= set(group) or not set(core) & set(group) for core in cores)
