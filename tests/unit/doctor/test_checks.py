"""Every misconfiguration that the doctor knows is found, with its mend, and a healthy host has none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dsl._record import replace
from dsl.control.clock import Clock
from dsl.control.messages import TO_HEAD, Checked, message_from_bytes, message_to_bytes
from dsl.doctor.host_checks import HOST_CHECKS, find_on_host
from dsl.doctor.job_checks import JOB_CHECKS, LAUNCH, Examined, find_all
from dsl.doctor.page import MOST_LINES, exit_code, page
from dsl.doctor.proxies import unproxied
from dsl.model.health import Directory, Health, Holder, Interface, MeetingLook, Symptom, Way
from dsl.model.job import Notice

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"
GB = 1 << 30
FOLDER = Directory("temporary files", "/tmp", 50 * GB, 1_000_000)
CACHE = replace(FOLDER, use="compile cache", path="/home/me/.triton")
FACES = (Interface("lo", 65536, True, ("127.0.0.1",)), Interface("eth0", 1500, True, ("10.0.0.1",)))
HEALTHY = Health(
    workers=8,
    peers=("n1", "n2"),
    name="n0",
    name_addresses=("10.0.0.1",),
    python="/opt/venv/bin/python",
    python_version="3.12.1",
    torch="2.6.0+cu124",
    torch_build="12.4",
    needs_torch=True,
    script="0123456789abcdef",
    accelerator="cuda",
    devices=8,
    visible=8,
    slots_named=True,
    shm_bytes=64 * GB,
    shm_free_bytes=60 * GB,
    open_files=1 << 20,
    locked_bytes=8 << 20,
    tasks_left=60_000,
    tasks_limit="ulimit -u (60000)",
    memory_left=512 * GB,
    memory_limit="this machine",
    cpus=64,
    governor="intel_pstate powersave",
    folders=(FOLDER, CACHE),
    interfaces=FACES,
    variables=(("NCCL_DEBUG", "WARN"), ("OMP_NUM_THREADS", "8")),
    kernel=(("clone3", ""), ("cgroup", "cannot be written")),
)
MEETING = MeetingLook("node0", 29500, False, "--master-addr", ("10.0.0.9",), False, "refuses")

ODD_THREADS = ("abc,,", "4,", ",4", "0", "-1", "4.0", "four", "٤", " ", "4;2", "00")
HOST_CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("interpreter", {"python_version": "", "torch": ""}, "error", "install it there"),
    ("torch", {"torch": ""}, "error", "install torch there"),
    ("torch-build", {"torch": "2.6.0+cpu", "torch_build": ""}, "error", "install torch's CUDA build"),
    ("device-mask", {"mask": "CUDA_VISIBLE_DEVICES=", "visible": 0}, "warning", "unset or correct it"),
    (
        "workers",
        {"workers": 16, "slots_named": False, "variables": ()},
        "warning",
        "as many workers as devices",
    ),
    ("driver", {"device_problems": ("the GPU is lost, reset it",)}, "error", "reset it"),
    ("driver", {"device_problems": ("pynvml is not installed, install it",)}, "warning", "install it"),
    ("uvm", {"lacks_uvm": True}, "error", "nvidia-modprobe"),
    ("leftovers", {"holders": (Holder(12, "python old.py", "GPU 0 (30 GB)"),)}, "warning", "kill 12"),
    ("leftovers", {"holders": (Holder(12, "python old.py", ""),)}, "warning", "kill 12"),
    ("shared-memory", {"shm_bytes": 64 << 20}, "warning", "--shm-size"),
    ("shared-memory", {"shm_free_bytes": 1 << 20}, "warning", "remove what earlier jobs"),
    ("open-files", {"open_files": 1024}, "warning", "ulimit -n"),
    ("processes", {"tasks_left": 900, "tasks_limit": "pids.max (1000)"}, "warning", "--pids-limit"),
    ("processes", {"tasks_left": 50, "tasks_limit": "pids.max (60)"}, "error", "--pids-limit"),
    ("memory", {"memory_left": 4 * GB, "memory_limit": "memory.max (4096 MB)"}, "warning", "--memory"),
    ("memory", {"memory_left": GB, "memory_limit": "memory.max (1024 MB)"}, "error", "--memory"),
    ("address-space", {"address_bytes": 32 * GB}, "warning", "ulimit -v unlimited"),
    ("locked-memory", {"has_rdma": True}, "warning", "ulimit -l unlimited"),
    ("cpus", {"cpu_quota": 2.0}, "warning", "--cpus"),
    ("cpus", {"cpus": 4, "variables": ()}, "warning", "--cpus-per-task"),
    ("threads", {"variables": (("OMP_NUM_THREADS", "128"),)}, "warning", "set it to 8"),
    ("threads", {"variables": (("OMP_NUM_THREADS", "32"),)}, "warning", "set it to 8"),
    *[
        ("threads", {"variables": (("OMP_NUM_THREADS", text),)}, "warning", f"{words}: set it to 8 or unset")
        for text, words in (
            ("99999999999999", "OMP_NUM_THREADS=99999999999999, but there are 64 CPUs"),
            ("9" * 400, f"OMP_NUM_THREADS={'9' * 40}...{'9' * 40}, but there are 64 CPUs"),
            *((odd, f"{odd!r} is no number of threads, so OpenMP ignores it") for odd in ODD_THREADS),
        )
    ],
    ("governor", {"governor": "acpi-cpufreq powersave"}, "warning", "cpupower"),
    ("disk", {"folders": (replace(FOLDER, free_bytes=0),)}, "error", "TMPDIR"),
    ("disk", {"folders": (replace(FOLDER, free_files=3),)}, "error", "make room"),
    ("disk", {"folders": (replace(CACHE, use="log files", free_bytes=GB // 2),)}, "warning", "make room"),
    ("cache-owner", {"folders": (replace(CACHE, is_writable=False),)}, "warning", "correct its owner"),
    ("noexec", {"folders": (replace(FOLDER, runs_code=False),)}, "warning", "TRITON_CACHE_DIR"),
    ("tmpdir", {"lost_tmpdir": "/scratch/me"}, "warning", "make it on every host"),
    ("stale-lock", {"locks": ("/home/me/.cache/torch_extensions/py312/fused/lock",)}, "error", "remove it"),
    ("socket-interface", {"variables": (("NCCL_SOCKET_IFNAME", "ib0"),)}, "error", "there is eth0"),
    ("socket-interface", {"variables": (("GLOO_SOCKET_IFNAME", "eth"),)}, "error", "there is eth0"),
    ("loopback", {"interfaces": (replace(FACES[0], is_up=False),)}, "error", "ip link set lo up"),
    ("own-name", {"name_addresses": ("127.0.1.1",)}, "warning", "correct /etc/hosts"),
    ("own-name", {"name_addresses": ("::1",)}, "warning", "correct /etc/hosts"),
    ("own-name", {"name_addresses": ("10.0.0.7",), "name_is_own": False}, "error", "correct /etc/hosts"),
    ("own-name", {"name_addresses": ()}, "warning", "correct /etc/hosts"),
    ("proxy", {"variables": (("http_proxy", "set"), ("no_proxy", "n1"))}, "warning", "no_proxy"),
    ("kernel", {"kernel": (("clone3", "not permitted"),)}, "warning", "seccomp"),
    ("slow-settings", {"variables": (("CUDA_LAUNCH_BLOCKING", "1"),)}, "warning", "unset it"),
    ("slow-settings", {"variables": (("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),)}, "warning", "unset it"),
    ("preload", {"missing_preloads": ("/usr/lib/libjemalloc.so",)}, "warning", "correct or unset it"),
    ("shadowed-module", {"shadows": ("/job/random.py",)}, "error", "rename the file"),
    ("meeting-point", {"meeting": replace(MEETING, addresses=())}, "error", "check the name"),
    ("meeting-point", {"meeting": replace(MEETING, answer="silent")}, "error", "firewall"),
    ("meeting-point", {"meeting": replace(MEETING, answer="unreachable")}, "error", "the route"),
    ("meeting-point", {"meeting": replace(MEETING, is_first=True)}, "error", "correct --master-addr"),
    (
        "meeting-point",
        {"meeting": replace(MEETING, addresses=("127.0.0.1",), is_own=True)},
        "error",
        "an address that all can reach",
    ),
    ("meeting-point", {"meeting": replace(MEETING, is_own=True, holder="pid 9 (x)")}, "warning", "end it"),
]


def host(name: str, **changes: Any) -> Examined:
    """One of the hosts of a job."""
    health = replace(HEALTHY, script=changes.pop("script", HEALTHY.script), **changes)
    address = f"10.0.0.{name[1:]}"
    faces = tuple(
        replace(one, addresses=(address,)) if one.name == "eth0" else one for one in health.interfaces
    )
    health = replace(health, name=name, interfaces=faces, name_addresses=(address,))
    return Examined(name, Checked(addresses=(address,), accelerator="cuda", machine=name, health=health))


def hosts() -> list[Examined]:
    """Three healthy hosts."""
    return [host("n0"), host("n1"), host("n2")]


def _machine(one: Examined, **changes: Any) -> Examined:
    assert one.checked is not None
    return replace(one, checked=replace(one.checked, **changes))


JUMBO = (FACES[0], replace(FACES[1], mtu=9000))
JOB_CASES: list[tuple[str, Examined, str, str]] = [
    ("torch-version", host("n1", torch="2.5.1+cu124"), "error", "install the same version"),
    ("torch-version", host("n1", torch="2.6.0+cu118"), "warning", "install the same version"),
    ("python-version", host("n1", python_version="3.11.9"), "warning", "use the same version"),
    ("other-script", host("n1", script="f" * 16), "error", "a file system that all share"),
    ("machines", _machine(host("n1"), machine="n0"), "warning", "one machine"),
    ("machines", _machine(host("n1"), accelerator="cpu"), "warning", "DS_ACCELERATOR"),
    ("clocks", replace(host("n1"), clock=Clock(3_000_000_000, 1000)), "warning", "let NTP set both"),
    ("route", replace(host("n1"), ways=(Way(0, "10.0.0.0", "silent"),)), "error", "firewalls"),
    ("route", replace(host("n1"), ways=(Way(0, "10.0.0.0", "refuses"),)), "error", "firewall"),
    (
        "route",
        replace(host("n1"), ways=(Way(0, "10.0.0.0", "unreachable", "no route to host"),)),
        "error",
        "correct the route",
    ),
    ("route", replace(host("n1"), ways=(Way(0, "10.0.0.0", "stranger"),)), "error", "correct /etc/hosts"),
    ("lost-packets", replace(host("n1"), ways=(Way(0, "10.0.0.0", "small"),)), "error", "mtu 1400"),
    ("mtu", host("n1", interfaces=JUMBO), "warning", "set the same on every host"),
    ("other-settings", host("n1", variables=(("NCCL_DEBUG", "INFO"),)), "warning", "or on none"),
    (
        "same-address",
        replace(
            host("n1"), checked=Checked(health=replace(HEALTHY, name="n1", name_addresses=("10.0.0.0",)))
        ),
        "warning",
        "correct /etc/hosts",
    ),
    (LAUNCH, _machine(host("n1"), problems=("script 'x' does not exist, check the path",)), "error", "check"),
    (LAUNCH, Examined("n1", problem="has not answered in time"), "error", "has not answered"),
]


@pytest.mark.parametrize("check, changes, level, mend", HOST_CASES)
def test_a_seeded_fault_of_a_host_is_found_with_its_mend(
    check: str, changes: dict[str, Any], level: str, mend: str
) -> None:
    (found,) = find_on_host(replace(HEALTHY, **changes))
    assert (found.check, found.level) == (check, level)
    assert mend in found.text
    assert "\n" not in found.text


@pytest.mark.parametrize("check, odd, level, mend", JOB_CASES)
def test_a_seeded_difference_between_hosts_is_found_with_its_mend(
    check: str, odd: Examined, level: str, mend: str
) -> None:
    ((names, found),) = find_all([host("n0"), odd, host("n2")])
    assert (found.check, found.level) == (check, level)
    assert mend in found.text
    assert "n1" in f"{names} {found.text}"


def test_healthy_hosts_have_no_finding() -> None:
    ways = (Way(1, "10.0.0.1", ""), Way(2, "10.0.0.2", ""))
    alone = replace(
        HEALTHY, peers=(), variables=(("http_proxy", "set"), ("NCCL_SOCKET_IFNAME", "^docker,lo"))
    )
    calm = Clock(200_000_000, 1000)
    assert find_all([replace(host("n0"), ways=ways, clock=calm), *hosts()[1:]]) == []
    assert find_all([Examined("", Checked(health=alone))]) == []
    assert find_on_host(Health()) == []
    assert find_on_host(replace(HEALTHY, meeting=MEETING, has_rdma=True, locked_bytes=None)) == []


@pytest.mark.parametrize("text", ["", "1", " 8 ", "8,4,2", "08"])
def test_a_number_of_threads_that_fits_has_no_finding(text: str) -> None:
    assert find_on_host(replace(HEALTHY, variables=(("OMP_NUM_THREADS", text),))) == []


def test_every_check_has_a_seeded_fault_and_the_page_lists_each_with_its_mend() -> None:
    seeded = {case[0] for case in (*HOST_CASES, *JOB_CASES)}
    assert seeded == {*HOST_CHECKS, *JOB_CHECKS, LAUNCH}
    assert len(HOST_CASES) + len(JOB_CASES) >= 60
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [name for name, *_ in rows] == [*HOST_CHECKS, *JOB_CHECKS, LAUNCH]
    assert all(len(mend.split()) > 1 for *_, mend in rows)


def test_equal_findings_are_one_line_and_errors_come_first() -> None:
    odd = [
        host(f"n{number}", open_files=1024, torch="" if number == 3 else HEALTHY.torch) for number in range(6)
    ]
    found = find_all(odd)
    lines = page(found, [one.name for one in odd], 48)
    assert lines[0] == "doctor: 6 hosts, 48 workers: 1 error, 1 warning"
    assert lines[1].startswith("error    n3: the script imports torch")
    assert lines[2].startswith("warning  n0, n1, n2, n3 and 2 more: a process may open 1024 files")
    assert (len(lines), exit_code(found)) == (3, 2)
    assert exit_code(found[1:]) == 1
    assert page([], (), 1) == [
        f"doctor: this host, 1 worker: all is well, {len(HOST_CHECKS)} checks found nothing"
    ]
    many = [((), Symptom("warning", "disk", str(number))) for number in range(40)]
    assert len(page(many, (), 1)) == MOST_LINES + 2 <= 24


def test_a_warning_of_the_plan_is_a_finding() -> None:
    planned = (Notice("warning", "there is no hostfile"), Notice("info", "hosts of Slurm"))
    (pair,) = find_all(hosts(), planned)
    assert pair == ((), Symptom("warning", LAUNCH, "there is no hostfile"))


def test_facts_travel_as_they_are_and_a_stranger_cannot_send_others() -> None:
    said = Checked(health=replace(HEALTHY, meeting=MEETING, holders=(Holder(1, "a", "b"),)))
    assert message_from_bytes(message_to_bytes(said), TO_HEAD) == said
    odd = Checked(health=replace(HEALTHY, python="py\x1b[31m\n"))
    read = message_from_bytes(message_to_bytes(odd), TO_HEAD)
    assert isinstance(read, Checked)
    assert read.health is not None
    assert read.health.python.isprintable()


@pytest.mark.parametrize(
    "exceptions, left",
    [
        ("", ["n1", "10.0.0.2"]),
        ("*", []),
        ("n1,10.0.0.0/8", []),
        (".cluster,n1", ["10.0.0.2"]),
        ("N1:80, 10.0.0.2", []),
        ("2.0.0.0/x", ["n1", "10.0.0.2"]),
    ],
)
def test_no_proxy_names_hosts_domains_and_networks(exceptions: str, left: list[str]) -> None:
    assert unproxied({"https_proxy": "set", "no_proxy": exceptions}, ["n1", "10.0.0.2"])[1] == left
    assert unproxied({"no_proxy": exceptions}, ["n1"]) == ("", [])
    assert unproxied({"HTTP_PROXY": "set", "NO_PROXY": ".me"}, ["a.me", "me", "b"]) == ("HTTP_PROXY", ["b"])
