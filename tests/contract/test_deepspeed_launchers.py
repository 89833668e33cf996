"""The commands of the launchers against those of DeepSpeed 0.19.8: each difference is here, and is one on purpose.

The reasons are in ``docs/compat.md``.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from tests.contract.golden_file import cases
from tests.contract.launcher_inputs import CASES, LAUNCHERS, LauncherCase
from tests.support.launchers import FOLDER, WORDS, start
from tests.support.machine import make_facts
from tests.support.requests import make_request

from dsl.plan.job import plan_job
from dsl.plan.remote import PROGRAMS

GOLDENS = list(zip(CASES, cases("launchers"), strict=True))
DROPPED = {
    # The job's variables and directory reach an agent by its connection, not by a command line.
    "pdsh": ["export NCCL_DEBUG=INFO; ", "cd /;"],
    "openmpi": [
        *("-x NCCL_DEBUG=INFO", "-x UCX_TLS=tcp", "--mca btl_tcp_if_include eth0"),
        "-hostfile /job/hostfile",
    ],
    "mpich": ["-genv NCCL_DEBUG=INFO", *(f"-genv {name} *" for name in ("MASTER_ADDR", "MASTER_PORT"))],
    "impi": ["-genv NCCL_DEBUG INFO", *(f"-genv {name} *" for name in ("MASTER_ADDR", "MASTER_PORT"))],
    "mvapich": ["-env NCCL_DEBUG=INFO", "--hostfile /FOLDER/hosts"],
    "slurm": ["--export=ALL,NCCL_DEBUG=INFO", "--nodelist *", "--nodes *"],
}
DROPPED["mpich"] += ["-genv WORLD_SIZE *", "-genv LOCAL_SIZE *"]
# One section for all ranks, which are told apart by what Hydra itself says.
DROPPED["impi"] += ["-genv WORLD_SIZE *", "-genv LOCAL_SIZE *", "-n 1", "-env RANK 0", "-env LOCAL_RANK 0"]
ADDED = {
    "pdsh": [],
    "openmpi": [f"-hostfile {FOLDER}/hosts", "--map-by seq:OVERSUBSCRIBE", "--bind-to none"],
    "mpich": [],
    "impi": ["-n *"],
    "mvapich": [f"--hostfile {FOLDER}/hosts"],
    "slurm": [
        *("--nodelist *", "--nodes *", "--distribution=arbitrary", "--cpu-bind=none"),
        *("--kill-on-bad-exit=1", "--wait=0", "--export=ALL"),
    ],
}
ADDED_WITH_A_PORT = {"openmpi": ["--mca plm_rsh_args *"]}
ABSENT_IN_SOME = {"-x UCX_TLS=tcp", "--mca btl_tcp_if_include eth0", "--nodelist *", "--nodes *"}


def without(words: list[str], gone: list[str]) -> list[str]:
    """The words without each of these runs of words; ``*`` is any word."""
    left = list(words)
    for text in gone:
        run = [text] if text.endswith(("; ", ";")) else text.split()
        ends = range(len(left) - len(run) + 1)
        found = [
            place
            for place in ends
            if all(one in ("*", word) for one, word in zip(run, left[place:], strict=False))
        ]
        assert found or text in ABSENT_IN_SOME, f"{text!r} is not in {left}"
        if found:
            del left[found[0] : found[0] + len(run)]
    return left


def options_of(case: LauncherCase) -> dict[str, Any]:
    given = dict(zip(case.options[::2], case.options[1::2], strict=True))
    port, gpus = given.get("--ssh_port"), given.get("--num_gpus")
    return {
        "args": tuple(shlex.split(given.get("--launcher_args", ""))),
        "ssh_port": None if port is None else int(port),
        "devices": () if gpus is None else (int(gpus),),  # on each host
        "environ": case.environ,
    }


@pytest.mark.parametrize("case, answer", [pair for pair in GOLDENS if "result" in pair[1]])
def test_the_words_are_those_of_deepspeed_but_for_these(case: LauncherCase, answer: Any) -> None:
    theirs = answer["result"]["argv"]
    added = ADDED[case.launcher]
    if "--ssh_port" in case.options:
        added = added + ADDED_WITH_A_PORT.get(case.launcher, [])
    slots = dict(answer["result"]["slots"])
    words = list(start(case.launcher, slots, **options_of(case)).argv)  # type: ignore[arg-type]
    found = words[:-1] if case.launcher == "pdsh" else words[: -1 - len(WORDS)]
    assert without(found, added) == without(theirs, DROPPED[case.launcher])


@pytest.mark.parametrize("case, answer", [pair for pair in GOLDENS if pair[0].launcher == "pdsh"])
def test_the_variables_are_those_of_deepspeed(case: LauncherCase, answer: Any) -> None:
    theirs = answer["result"]["env"]
    found = dict(start("pdsh", dict(answer["result"]["slots"]), **options_of(case)).env)
    assert found["PDSH_RCMD_TYPE"] == theirs["PDSH_RCMD_TYPE"]
    expected = theirs.get("PDSH_SSH_ARGS_APPEND", "").split()
    words = found["PDSH_SSH_ARGS_APPEND"].split()
    assert [word for word in words if not word.startswith("-o")] == expected


@pytest.mark.parametrize("case, answer", GOLDENS[: len(LAUNCHERS)])
def test_a_worker_is_told_its_local_rank_where_deepspeeds_own_program_starts_it(
    case: LauncherCase, answer: Any
) -> None:
    """Else the launcher's tasks are the script, and all of them have the same words."""
    is_told = "deepspeed.launcher.launch" in answer["result"]["program"]
    hostfile = "".join(f"{name} slots={count}\n" for name, count in answer["result"]["slots"])
    programs = {program for some in PROGRAMS.values() for program in some}
    facts = make_facts(files={"H": hostfile}, programs=tuple(programs))
    request = make_request("deepspeed", "train.py", hostfile="H", launcher=case.launcher)
    assert plan_job(request, facts).job.program.local_rank_option == ("--local_rank" if is_told else "")
    assert answer["result"]["program"][-1] == "train.py"


def test_what_deepspeed_refuses() -> None:
    """Unequal hosts, single slots and counts: all of it is told to the launcher here."""
    refused = {(case.launcher, *case.options[:1]) for case, answer in GOLDENS if "error" in answer}
    mpi = ("openmpi", "mpich", "impi", "mvapich")
    assert refused == {
        *((launcher, option) for launcher in mpi for option in ("--include", "--num_gpus")),
        *((launcher,) for launcher in mpi[1:]),
        ("slurm",),
        ("slurm", "--include"),
    }
