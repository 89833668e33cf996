"""Every misconfiguration that the doctor knows is found, with its mend, and a healthy host has none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.support.conducting import coming

from dsl._record import replace
from dsl.conductor.terms import objection
from dsl.control.clock import Clock
from dsl.control.messages import TO_HEAD, Checked, Hello
from dsl.doctor.host_checks import HOST_CHECKS, find_on_host, unproxied
from dsl.doctor.job_checks import (
    FREE,
    JOB_CHECKS,
    LAUNCH,
    MOST_LINES,
    Examined,
    exit_code,
    find_all,
    page,
    start_notices,
)
from dsl.doctor.ring_checks import RING_CHECKS
from dsl.model.codec import from_line, to_line
from dsl.model.health import Directory, Health, Holder, Interface, MeetingLook, Symptom, Way
from dsl.model.job import Notice

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"
GB = 1 << 30
FOLDER = Directory("temporary files", "/tmp", 50 * GB, 1_000_000)
CACHE = replace(FOLDER, use="compile cache", path="/home/me/.triton")
ROOMS = ("program", "devices", "limits", "folders")


def changed(health: Health, **fields: Any) -> Health:
    """The health with other facts, each in its room."""
    for name, value in fields.items():
        rooms = [room for room in ROOMS if hasattr(getattr(health, room), name)]
        change = {room: replace(getattr(health, room), **{name: value}) for room in rooms}
        health = replace(health, **(change or {name: value}))
    return health


FACES = (Interface("lo", 65536, True, ("127.0.0.1",)), Interface("eth0", 1500, True, ("10.0.0.1",)))
HEALTHY = changed(
    Health(),
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
    count=8,
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
    found=(FOLDER, CACHE),
    interfaces=FACES,
    variables=(("NCCL_DEBUG", "WARN"), ("OMP_NUM_THREADS", "8")),
    kernel=(("clone3", ""), ("cgroup", "cannot be written")),
)
MEETING = MeetingLook("node0", 29500, False, "--master-addr", ("10.0.0.9",), False, "refuses")

LOOPBACK = replace(MEETING, addresses=("127.0.0.1",), is_own=True)
SIXTEEN = {"workers": 16, "slots_named": False}
ODD_THREADS = ("abc,,", "4,", ",4", "0", "-1", "4.0", "four", "٤", " ", "4;2", "00")
HOST_CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("interpreter", {"python_version": "", "torch": ""}, "error", "install it there"),
    ("torch", {"torch": ""}, "error", "install torch there"),
    ("torch-build", {"torch": "2.6.0+cpu", "torch_build": ""}, "error", "install torch's CUDA build"),
    ("device-mask", {"mask": "CUDA_VISIBLE_DEVICES=", "visible": 0}, "warning", "unset or correct it"),
    ("workers", {**SIXTEEN, "variables": ()}, "warning", "as many workers as devices"),
    ("driver", {"problems": ("the GPU is lost, reset it",)}, "error", "reset it"),
    ("driver", {"problems": ("pynvml is not installed, install it",)}, "warning", "install it"),
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
    ("disk", {"found": (replace(FOLDER, free_bytes=0),)}, "error", "TMPDIR"),
    ("disk", {"found": (replace(FOLDER, free_files=3),)}, "error", "make room"),
    ("disk", {"found": (replace(CACHE, use="log files", free_bytes=GB // 2),)}, "warning", "make room"),
    ("cache-owner", {"found": (replace(CACHE, is_writable=False),)}, "warning", "correct its owner"),
    ("noexec", {"found": (replace(FOLDER, runs_code=False),)}, "warning", "TRITON_CACHE_DIR"),
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
    ("meeting-point", {"meeting": LOOPBACK}, "error", "an address that all can reach"),
    ("meeting-point", {"meeting": replace(MEETING, is_own=True, holder="pid 9 (x)")}, "warning", "end it"),
]


def host(name: str, **changes: Any) -> Examined:
    """One of the hosts of a job."""
    health = changed(HEALTHY, **changes)
    address = f"10.0.0.{name[1:]}"
    faces = tuple(
        replace(one, addresses=(address,)) if one.name == "eth0" else one for one in health.interfaces
    )
    health = replace(health, name=name, interfaces=faces, name_addresses=(address,))
    return Examined(name, Checked(addresses=(address,), accelerator="cuda", machine=name, health=health))


def hosts() -> list[Examined]:
    return [host("n0"), host("n1"), host("n2")]


def _machine(one: Examined, **changes: Any) -> Examined:
    assert one.checked is not None
    return replace(one, checked=replace(one.checked, **changes))


JUMBO = (FACES[0], replace(FACES[1], mtu=9000))
NO_ROUTE = Way(0, "10.0.0.0", "unreachable", "no route to host")
SAME = replace(HEALTHY, name="n1", name_addresses=("10.0.0.0",))
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
    ("route", replace(host("n1"), ways=(NO_ROUTE,)), "error", "correct the route"),
    ("route", replace(host("n1"), ways=(Way(0, "10.0.0.0", "stranger"),)), "error", "correct /etc/hosts"),
    ("lost-packets", replace(host("n1"), ways=(Way(0, "10.0.0.0", "small"),)), "error", "mtu 1400"),
    ("mtu", host("n1", interfaces=JUMBO), "warning", "set the same on every host"),
    ("other-settings", host("n1", variables=(("NCCL_DEBUG", "INFO"),)), "warning", "or on none"),
    ("same-address", replace(host("n1"), checked=Checked(health=SAME)), "warning", "correct /etc/hosts"),
    (LAUNCH, _machine(host("n1"), problems=("script 'x' does not exist, check the path",)), "error", "check"),
    (LAUNCH, Examined("n1", problem="has not answered in time"), "error", "has not answered"),
]


@pytest.mark.parametrize("check, changes, level, mend", HOST_CASES)
def test_a_seeded_fault_of_a_host_is_found_with_its_mend(
    check: str, changes: dict[str, Any], level: str, mend: str
) -> None:
    (found,) = find_on_host(changed(HEALTHY, **changes))
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
    assert find_on_host(changed(HEALTHY, meeting=MEETING, has_rdma=True, locked_bytes=None)) == []


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
    assert [name for name, *_ in rows] == [*HOST_CHECKS, *JOB_CHECKS, LAUNCH, *RING_CHECKS]
    assert all(len(mend.split()) > 1 for *_, mend in rows)


def test_equal_findings_are_one_line_and_errors_come_first() -> None:
    odd = [
        host(f"n{number}", open_files=1024, torch="" if number == 3 else HEALTHY.program.torch)
        for number in range(6)
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
    strange = Symptom("error", LAUNCH, "port 1 is taken by python -c \nx\x1b[31m(): end it")
    assert page([((), strange)], (), 1)[1] == f"error    port 1 is taken by python -c  x(): end it [{LAUNCH}]"
    many = [((), Symptom("warning", "disk", str(number))) for number in range(40)]
    assert len(page(many, (), 1)) == MOST_LINES + 2 <= 24


def test_a_warning_of_the_plan_is_a_finding() -> None:
    planned = (Notice("warning", "there is no hostfile"), Notice("info", "hosts of Slurm"))
    (pair,) = find_all(hosts(), planned)
    assert pair == ((), Symptom("warning", LAUNCH, "there is no hostfile"))


def test_facts_travel_as_they_are_and_a_stranger_cannot_send_others() -> None:
    said = Checked(health=changed(HEALTHY, meeting=MEETING, holders=(Holder(1, "a", "b"),)))
    assert from_line(to_line(said), TO_HEAD) == said
    odd = Checked(health=changed(HEALTHY, python="py\x1b[31m\n"))
    read = from_line(to_line(odd), TO_HEAD)
    assert isinstance(read, Checked)
    assert read.health is not None
    assert read.health.program.python.isprintable()


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


def test_the_same_version_has_to_run_everywhere() -> None:
    hello, terms = Hello("0.0.9", 1, "n1", 7, python="/opt/bin/python", workers=1), coming(2)
    assert objection(replace(terms, version="0.0.9"), 1, hello) == ""
    assert objection(replace(terms, version="0.1.0"), 1, hello) == (
        "it has dsl 0.0.9, this host has 0.1.0: install the same version for /opt/bin/python"
    )


def said_at_a_start(*hosts: Examined) -> list[str]:
    """Texts of the warnings of a start."""
    notices = start_notices(hosts)
    assert {one.level for one in notices} <= {"warning"}
    return [one.text for one in notices]


def test_a_start_makes_the_free_checks() -> None:
    assert {*JOB_CHECKS} >= {*FREE}
    ways = (Way(0, "10.0.0.0", "silent"),)
    assert (
        said_at_a_start(Examined("n0", Checked()), Examined("n1", Checked(), ways=ways), Examined("n2")) == []
    )


def test_a_start_that_looks_at_its_hosts_makes_all_checks() -> None:
    hosts = [host("n0", open_files=1024), host("n1", open_files=1024, script="fedcba9876543210")]
    error, warning = start_notices(hosts)
    assert (error.level, warning.level) == ("error", "warning")
    assert error.text.startswith("n1: the script is another one than on n0: copy it")
    assert error.text.endswith(" [other-script]")
    assert warning.line.startswith("warning: n0, n1: a process may open 1024 files")


def test_hosts_of_different_accelerators_are_worth_a_word() -> None:
    kinds = ("cuda", "cpu", "cuda", "")
    hosts = [Examined(f"n{at}", Checked(accelerator=kind)) for at, kind in enumerate(kinds)]
    assert said_at_a_start(hosts[0], hosts[2], hosts[3]) == []
    assert said_at_a_start(*hosts) == [
        "the accelerators differ: cuda on hosts n0, n2; cpu on host n1; set DS_ACCELERATOR if that is not meant"
    ]


def test_a_machine_that_is_named_twice_is_worth_a_word() -> None:
    a, b, again = (
        Examined(name, Checked(machine=machine))
        for name, machine in (("n0", "a"), ("n1", "b"), ("n0-ib", "a"))
    )
    assert said_at_a_start(a, b) == []
    assert said_at_a_start(Examined("n0", Checked()), Examined("n1", Checked())) == []
    assert said_at_a_start(a, b, again) == [
        "hosts n0, n0-ib are one machine: their workers share its devices and CPUs"
    ]


def test_many_hosts_are_not_all_named() -> None:
    (text,) = said_at_a_start(*[Examined(f"n{number}", Checked(machine="a")) for number in range(11)])
    assert text.startswith("hosts n0, n1, n2, n3, n4, n5, n6, n7, ... (11 in all) are one machine")


@pytest.mark.parametrize("offset_s, bound_s", [(0.0, 0.0), (1.0, 0.0), (-1.0, 0.0), (5.0, 4.5)])
def test_clocks_that_may_be_a_second_apart_are_not_worth_a_word(offset_s: float, bound_s: float) -> None:
    clock = Clock(int(offset_s * 1e9), int(bound_s * 1e9))
    assert said_at_a_start(Examined("n1", clock=clock)) == []


@pytest.mark.parametrize(
    "offset_ns, error_ns, words",
    [
        (3_210_000_000, 1_500_000, "3.2 s ahead of this one's (to within 1.5 ms)"),
        (-3_210_000_000, 1_000, "3.2 s behind this one's (to within 0.1 ms)"),
    ],
)
def test_clocks_that_are_surely_more_than_a_second_apart_are(
    offset_ns: int, error_ns: int, words: str
) -> None:
    assert said_at_a_start(Examined("n1", clock=Clock(offset_ns, error_ns))) == [
        f"the clock of host n1 is {words}: times in their logs do not compare, let NTP set both"
    ]
