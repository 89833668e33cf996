"""The launchers whose tasks are ranks: what they are told, so that rank order is the order of the hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.launchers import FOLDER, start
from tests.support.machine import make_facts
from tests.support.requests import make_request

from dsl.errors import HostNameError
from dsl.launchers.table import starts_of
from dsl.plan.job import plan_job

if TYPE_CHECKING:
    from dsl.plan.remote import LauncherName

KEY: Any = (("KEY", "s3cret"),)
AGENT = "/opt/py -m dsl_launcher.node --connect 10.0.0.1:7"
FILE = f"{FOLDER}/hosts"
EQUAL = {"b": 2, "a": 2}
UNEQUAL = {"b": 2, "a": 1, "c": 3}
OPENMPI = f"mpirun -n %s -hostfile {FILE} --mca btl ^openib --map-by seq:OVERSUBSCRIBE --bind-to none -x KEY {AGENT}"
SLURM_HABITS = "--distribution=arbitrary --cpu-bind=none --kill-on-bad-exit=1 --wait=0 --export=ALL,KEY"
MV2 = (
    "-env MV2_SMP_USE_CMA=0 -env MV2_DEBUG_SHOW_BACKTRACE=1 -env MV2_SUPPORT_DL=1 -env MV2_ENABLE_AFFINITY=0 "
    "-env MV2_INTER_ALLGATHER_TUNING=5 -env MV2_CUDA_USE_NAIVE=0"
)


@pytest.mark.parametrize(
    "launcher, slots, per_node, argv, file",
    [
        ("openmpi", EQUAL, False, OPENMPI % 4, "b b a a"),
        ("openmpi", UNEQUAL, False, OPENMPI % 6, "b b a c c c"),
        ("openmpi", UNEQUAL, True, OPENMPI % 3, "b a c"),
        ("mpich", EQUAL, False, f"mpirun -n 4 -ppn 2 -hosts b,a {AGENT}", None),
        ("mpich", UNEQUAL, False, f"mpirun -n 6 -hosts b:2,a:1,c:3 {AGENT}", None),
        ("mpich", UNEQUAL, True, f"mpirun -n 3 -ppn 1 -hosts b,a,c {AGENT}", None),
        ("impi", EQUAL, False, f"mpirun -ppn 2 -genv I_MPI_PIN 0 -hosts b,a -n 4 {AGENT}", None),
        (
            "impi",
            UNEQUAL,
            False,
            f"mpirun -genv I_MPI_PIN 0 -machinefile {FILE} -n 6 {AGENT}",
            "b:2 a:1 c:3",
        ),
        ("impi", UNEQUAL, True, f"mpirun -ppn 1 -genv I_MPI_PIN 0 -hosts b,a,c -n 3 {AGENT}", None),
        ("mvapich", EQUAL, False, f"mpirun -np 4 -ppn 2 --hostfile {FILE} {MV2} {AGENT}", "b a"),
        ("mvapich", UNEQUAL, False, f"mpirun -np 6 --hostfile {FILE} {MV2} {AGENT}", "b:2 a:1 c:3"),
        ("mvapich", UNEQUAL, True, f"mpirun -np 3 -ppn 1 --hostfile {FILE} {MV2} {AGENT}", "b a c"),
        ("slurm", EQUAL, False, f"srun -n 4 --nodelist b,b,a,a --nodes 2 {SLURM_HABITS} {AGENT}", None),
        ("slurm", UNEQUAL, False, f"srun -n 6 --nodelist b,b,a,c,c,c --nodes 3 {SLURM_HABITS} {AGENT}", None),
        ("slurm", UNEQUAL, True, f"srun -n 3 --nodelist b,a,c --nodes 3 {SLURM_HABITS} {AGENT}", None),
    ],
)
def test_tasks_are_asked_for_host_after_host(
    launcher: LauncherName, slots: dict[str, int], argv: str, file: str | None, *, per_node: bool
) -> None:
    one = start(launcher, slots, per_node=per_node, variables=KEY)
    assert list(one.argv) == argv.split()
    assert [(path, text.split()) for path, text in one.files] == (
        [] if file is None else [(FILE, file.split())]
    )
    assert one.env[:1] == KEY
    assert (one.node_rank, one.speaks) == (None, False)


def test_a_host_without_slots_gets_no_task() -> None:
    assert start("mpich", {"a": 1, "b": 0}).argv[:7] == ("mpirun", "-n", "1", "-ppn", "1", "-hosts", "a")
    assert start("slurm", {"a": 1, "b": 0}).argv[:7] == ("srun", "-n", "1", "--nodelist", "a", "--nodes", "1")


@pytest.mark.parametrize(
    "launcher, before, behind",
    [
        ("openmpi", "none", "-x"),
        ("mpich", "2", "-hosts"),
        ("impi", "2", "-genv"),
        ("mvapich", FILE, "-env"),
        ("slurm", "4", "--nodelist"),
    ],
)
def test_words_for_the_launcher_stand_where_deepspeed_puts_them(
    launcher: LauncherName, before: str, behind: str
) -> None:
    words = start(launcher, EQUAL, args=("--own", "a b"), variables=KEY).argv
    place = words.index("--own")
    assert words[place - 1 : place + 3] == (before, "--own", "a b", behind)


@pytest.mark.parametrize(
    "launcher, args, gone",
    [
        ("openmpi", "--mca btl tcp,self", "^openib"),
        ("openmpi", "-mca btl tcp,self", "^openib"),
        ("openmpi", "--bind-to core", "none"),
        ("openmpi", "-map-by slot", "seq:OVERSUBSCRIBE"),
        ("openmpi", "--rankfile /r", "seq:OVERSUBSCRIBE"),
        ("openmpi", "-rf /r", "seq:OVERSUBSCRIBE"),
        ("impi", "-genv I_MPI_PIN 1", "0"),
        ("impi", "-genv I_MPI_PIN=1", "0"),
        ("slurm", "--cpu-bind=cores", "--cpu-bind=none"),
        ("slurm", "--cpu_bind=cores", "--cpu-bind=none"),
        ("slurm", "--kill-on-bad-exit=0", "--kill-on-bad-exit=1"),
    ],
)
def test_what_the_user_tells_the_launcher_is_not_said_again(
    launcher: LauncherName, args: str, gone: str
) -> None:
    """Open MPI refuses an option that it is given twice."""
    assert gone in start(launcher, EQUAL).argv
    words = start(launcher, EQUAL, args=tuple(args.split())).argv
    assert gone not in words
    assert set(args.split()) <= set(words)


def test_open_mpi_runs_as_root_only_for_root() -> None:
    flag = "--allow-run-as-root"
    assert flag not in start("openmpi", EQUAL).argv
    assert start("openmpi", EQUAL, is_root=True).argv.count(flag) == 1
    assert start("openmpi", EQUAL, is_root=True, args=(flag,)).argv.count(flag) == 1


@pytest.mark.parametrize(
    "launcher, kind, more",
    [
        ("mpich", "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXTRA_ARGS"),
        ("mvapich", "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXTRA_ARGS"),
        ("impi", "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    ],
)
def test_hydra_uses_ssh_unless_the_user_says_otherwise(launcher: LauncherName, kind: str, more: str) -> None:
    """By srun it puts tasks on other hosts than the list says."""
    assert start(launcher, EQUAL).env == ((kind, "ssh"),)
    assert start(launcher, EQUAL, environ=((kind, "slurm"),)).env == ()
    assert start(launcher, EQUAL, ssh_port=7).env == ((kind, "ssh"), (more, "-p 7"))
    assert start(launcher, EQUAL, ssh_port=7, environ=((more, "-v"),)).env[1] == (more, "-v -p 7")


def test_open_mpi_reaches_another_port() -> None:
    words = start("openmpi", EQUAL, ssh_port=7).argv
    place = words.index("plm_rsh_args")
    assert words[place - 1 : place + 2] == ("--mca", "plm_rsh_args", "-p 7")
    own = ("--mca", "plm_rsh_args", "-v")
    assert "-p 7" not in start("openmpi", EQUAL, ssh_port=7, args=own).argv


def test_open_mpi_has_one_user_for_all_other_hosts() -> None:
    one = start("openmpi", {"me": 1, "pat@b": 1, "pat@c": 2}, own_name="me", ssh_port=7)
    assert one.argv[one.argv.index("plm_rsh_args") + 1] == "-l pat -p 7"
    assert one.files[0][1].split() == ["me", "b", "c", "c"]  # its mapper knows no host pat@b
    for slots in ({"b": 1, "pat@c": 1}, {"kim@b": 1, "pat@c": 1}):
        with pytest.raises(HostNameError, match="with different users"):
            start("openmpi", slots, own_name="me")


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "slurm"])
def test_this_machine_has_its_own_name_in_a_list_by_which_hosts_find_each_other(launcher: str) -> None:
    files = {"H": "localhost slots=1\n127.0.0.2 slots=1\nbeta slots=1\n"}
    facts = make_facts(files=files, host="head")
    planned = plan_job(make_request("deepspeed", hostfile="H", launcher=launcher), facts)
    assert planned.remote is not None
    (one,) = starts_of(planned.job, planned.remote, facts, is_root=False)
    shown = (
        " ".join([*one.argv, *[text for _, text in one.files]]).replace(",", " ").replace(":1", "").split()
    )
    assert [shown.count(name) for name in ("localhost", "127.0.0.2", "head", "beta")] == [0, 0, 2, 1]
    assert [host.name for host in planned.job.hosts] == ["localhost", "127.0.0.2", "beta"]


def test_settings_for_mvapich_are_the_users_if_he_makes_them() -> None:
    words = start("mvapich", EQUAL, environ=(("MV2_SUPPORT_DL", "0"),), is_cuda=True).argv
    assert "MV2_USE_CUDA=1" in words
    assert not any(word.startswith("MV2_SUPPORT_DL") for word in words)
    assert "MV2_USE_CUDA=1" not in start("mvapich", EQUAL).argv


def test_slurm_gives_each_node_the_devices_that_are_asked_for() -> None:
    words = start("slurm", EQUAL, devices=(2, 2)).argv
    assert words[words.index("--gpus-per-node") + 1] == "2"
    uneven = start("slurm", EQUAL, devices=(2, 3)).argv
    assert uneven[uneven.index("--gpus") + 1] == "5"
    assert "--gpus-per-node" not in uneven
    for none in (start("slurm", EQUAL), start("slurm", EQUAL, devices=(2, 2), args=("--gres=gpu:1",))):
        assert not {"--gpus-per-node", "--gpus"}.intersection(none.argv)


def test_slurm_reads_a_long_list_from_a_file() -> None:
    """One word of a command line holds 128 KiB."""
    one = start("slurm", {f"node{i:05}": 8 for i in range(3000)})
    assert one.argv[one.argv.index("--nodelist") + 1] == FILE
    ((path, text),) = one.files
    assert path == FILE
    assert text.splitlines()[7:9] == ["node00000", "node00001"]
    assert max(map(len, one.argv)) < 1000


@pytest.mark.parametrize(
    "name", ["SLURM_HOSTFILE", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"]
)
def test_slurm_does_not_see_what_an_allocation_says_about_tasks(name: str) -> None:
    """One agent starts several workers, so it needs all devices of its host, and shares them out."""
    assert name in start("slurm", EQUAL).unset


@pytest.mark.parametrize(
    "launcher, rank",
    [
        ("openmpi", "$OMPI_COMM_WORLD_RANK"),
        ("mpich", "${PMI_RANK:-$PMIX_RANK}"),
        ("impi", "${PMI_RANK:-$PMIX_RANK}"),
        ("mvapich", "${PMI_RANK:-$PMIX_RANK}"),
        ("slurm", "$SLURM_PROCID"),
    ],
)
def test_interpreters_that_differ_are_chosen_by_the_rank(launcher: LauncherName, rank: str) -> None:
    one = start(launcher, UNEQUAL, pythons=("/1", "/1", "/3"))
    place = one.argv.index("sh")
    assert one.argv[place + 1] == "-c"
    assert one.argv[place + 2] == f'[ "{rank}" -ge 3 ] || exec /1 "$@"; exec /3 "$@"'
    assert one.argv[place + 3 :] == ("dsl", "-m", "dsl_launcher.node", "--connect", "10.0.0.1:7")
    by_node = start(launcher, UNEQUAL, pythons=("/1", "/1", "/3"), per_node=True)
    assert f'[ "{rank}" -ge 2 ] || exec /1 "$@"; exec /3 "$@"' in by_node.argv


@pytest.mark.parametrize("launcher", ["openmpi", "mpich", "impi", "mvapich", "slurm"])
def test_a_script_is_sourced_before_each_task(launcher: LauncherName) -> None:
    words = start(launcher, EQUAL, venv_script="/e/activate").argv
    place = words.index("bash")
    assert words[place + 3 : place + 6] == ("dsl", "/e/activate", "/opt/py")
