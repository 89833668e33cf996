"""Which workers a fork server forks, how many servers that takes, and who is executed all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.machine import make_facts
from tests.support.outcome import assert_one_line, error_of
from tests.support.requests import make_request, plan_of

from dsl._record import replace
from dsl.agent.node import conducted
from dsl.errors import OptionError
from dsl.machine import read_text
from dsl.machine.kernel import NumaNode
from dsl.model.job import Job, NodePlan
from dsl.model.request import Program
from dsl.plan.job import plan_job
from dsl.plan.starting import is_late, may_be_secret, why_no_torch, with_fork_servers
from dsl.plan.worker import FLAVOURS

TORCH_SCRIPT = "import os\nfrom torch import nn\n"
OTHER_SCRIPT = "import os  # not torch\n"


def planned(flavour: str = "torch", count: int = 2, attempt: int = 0, **wishes: Any) -> NodePlan:
    """The plan of this many workers on one node."""
    facts = wishes.pop("facts", None) or make_facts(files=wishes.pop("files", {}), environ={"HOME": "/me"})
    own = {"num_gpus": count} if flavour == "deepspeed" else {"nproc_per_node": str(count)}
    wishes.setdefault("start_method", "forkserver")
    return plan_of(make_request(flavour, wishes.pop("script", "t.py"), "a", **own, **wishes), facts, attempt)


def lines(plan: NodePlan) -> list[str]:
    """What is said about starting."""
    return [one.line for one in plan.notices if "start method" in one.text or "fork server" in one.text]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_without_the_wish_every_worker_is_executed(method: str) -> None:
    plan = planned(start_method=method)
    assert plan.fork_servers == ()
    assert {worker.fork_server for worker in plan.workers} == {None}
    assert plan.workers == planned(start_method="spawn").workers


@pytest.mark.parametrize("flavour", ["torch", "deepspeed"])
def test_workers_that_differ_in_their_places_alone_share_a_server(flavour: str) -> None:
    plan = planned(flavour, 4, facts=make_facts(cuda=4, environ={"HOME": "/me"}))
    (server,) = plan.fork_servers
    assert [worker.fork_server for worker in plan.workers] == [0] * 4
    assert server.interpreter == ("/opt/python", "-u")
    assert (server.script, server.is_module, server.preload) == ("t.py", False, ())
    assert [worker.argv[worker.fork_entry] for worker in plan.workers] == ["t.py"] * 4
    assert lines(plan) == []


def test_a_server_knows_no_place_and_no_meeting() -> None:
    plan = planned(count=2)
    env = plan.fork_servers[0].env
    assert env["HOME"] == "/me"
    assert env["OMP_NUM_THREADS"] == "1"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        assert name not in env
        assert name in {**plan.env, **plan.workers[0].env}


def test_restarts_find_the_same_server() -> None:
    """The port, the attempt and the files of a worker change; the server must not."""
    ports = iter((5, 6))
    facts = make_facts(pick=lambda: next(ports))
    first, second = (planned(facts=facts, attempt=number, max_restarts=1) for number in (0, 1))
    assert first.env["MASTER_PORT"] != second.env["MASTER_PORT"]
    assert first.fork_servers == second.fork_servers


@pytest.mark.parametrize(
    "name, late",
    [
        *[(name, True) for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")],
        *[(name, True) for name in ("HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "TORCHELASTIC_ERROR_FILE")],
        *[(name, True) for name in ("DSL_JOB_ID", "DSL_ATTEMPT", "DSL_RESTART_REASON")],
        *[(name, False) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")],
        *[(name, False) for name in ("PYTHONPATH", "PYTHONHASHSEED", "LD_PRELOAD", "LANG", "LC_ALL")],
        *[(name, False) for name in ("LD_LIBRARY_PATH", "KMP_AFFINITY", "MALLOC_ARENA_MAX")],
        *[(name, False) for name in ("TORCH_LOGS", "NCCL_DEBUG")],
        *[(name, False) for name in ("PYTORCH_CUDA_ALLOC_CONF", "CUDA_HOME", "TZ", "HF_HOME", "ANYTHING")],
    ],
)
def test_which_variables_may_differ(name: str, *, late: bool) -> None:
    for flavour in ("torch", "deepspeed"):
        assert is_late(name, FLAVOURS[flavour]) is late


def differing(values: list[str]) -> NodePlan:
    """Workers that differ in a variable that is read early."""
    facts = make_facts()
    plan = planned(count=len(values), start_method="spawn", facts=facts)
    workers = [
        replace(worker, env={**worker.env, "KMP_AFFINITY": value})
        for worker, value in zip(plan.workers, values, strict=True)
    ]
    request = make_request("torch", "t.py", nproc_per_node=str(len(values)), start_method="forkserver")
    job = plan_job(request, facts).job
    return with_fork_servers(replace(plan, workers=tuple(workers), job=job), facts)


@pytest.mark.parametrize(
    "values, served, said",
    [
        ("aabb", [0, 0, 1, 1], "2 fork servers: the workers differ in KMP_AFFINITY"),
        ("aaab", [0, 0, 0, None], "1 fork server, rank 3 executed: the workers differ in KMP_AFFINITY"),
        ("abc", [None] * 3, "no fork server, ranks 0-2 executed: the workers differ in KMP_AFFINITY"),
    ],
)
def test_a_difference_in_what_is_read_early_takes_another_server_or_none(
    values: str, served: list[int | None], said: str
) -> None:
    plan = differing(list(values))
    assert [worker.fork_server for worker in plan.workers] == served
    assert [worker.fork_entry for worker in plan.workers] == [0 if one is None else 2 for one in served]
    assert lines(plan) == [said]
    for worker in plan.workers:
        if worker.fork_server is not None:
            server = plan.fork_servers[worker.fork_server]
            assert server.env["KMP_AFFINITY"] == worker.env["KMP_AFFINITY"]


def test_a_module_is_named_with_its_flag() -> None:
    plan = planned(kind="module", script="pack.train")
    worker = plan.workers[0]
    assert worker.argv[worker.fork_entry :] == ("-m", "pack.train", "a")
    assert (plan.fork_servers[0].script, plan.fork_servers[0].is_module) == ("pack.train", True)


def test_a_call_begins_with_the_program_that_makes_it() -> None:
    program = Program("call", "/opt/python", ("-X", "dev", "-u", "/dsl/_worker.py"), name="f")
    request = make_request("functions", nproc_per_node="2", rdzv_backend="c10d", start_method="forkserver")
    request = replace(request, program=program, start=replace(request.start, source="/me/code.py"))
    plan = plan_of(request, make_facts())
    worker = plan.workers[0]
    assert plan.fork_servers[0].interpreter == ("/opt/python", "-X", "dev", "-u")
    assert worker.argv[worker.fork_entry] == "/dsl/_worker.py"
    assert plan.fork_servers[0].script == "/me/code.py"


def test_what_is_not_python_is_executed_and_that_is_said_once() -> None:
    facts = make_facts(programs=("t.py",))
    plans = [planned(kind="program", facts=facts, attempt=number) for number in (0, 1)]
    assert [plan.fork_servers for plan in plans] == [(), ()]
    said = "warning: start method forkserver has no effect: t.py is started as a program"
    assert [lines(plan) for plan in plans] == [[said], []]


@pytest.mark.parametrize("method", ["forkserver", "warm"])
def test_an_interpreter_that_a_shell_runs_is_executed(method: str) -> None:
    """It may read the rank of its worker, or set variables."""
    facts = make_facts(environ={"PYTHON_EXEC": "python.sh"})
    plan = planned(start_method=method, facts=facts)
    assert plan.fork_servers == ()
    why = "python.sh is a script that may start each worker in another way"
    assert lines(plan) == [f"warning: start method {method} has no effect: {why}"]
    assert planned(facts=make_facts(environ={"PYTHON_EXEC": "python3"})).fork_servers


IMPORTS_TORCH = "forkserver, 2 workers that import torch"


@pytest.mark.parametrize(
    "wishes, said",
    [
        ({"files": {"t.py": TORCH_SCRIPT}}, IMPORTS_TORCH),
        ({"kind": "module", "script": "a.b", "files": {"a/b.py": TORCH_SCRIPT}}, IMPORTS_TORCH),
        ({"script": "folder", "files": {"folder/__main__.py": TORCH_SCRIPT}}, IMPORTS_TORCH),
        ({"files": {"t.py": OTHER_SCRIPT}}, "spawn, t.py does not import torch"),
        ({"files": {"t.py": TORCH_SCRIPT}, "count": 1}, "spawn, there is one worker"),
        ({"kind": "program"}, "spawn, t.py is started as a program"),
        ({}, "spawn, the text of t.py was not found"),
    ],
)
def test_auto_chooses_by_what_it_knows_and_says_so(wishes: dict[str, Any], said: str) -> None:
    plan = planned(start_method="auto", **wishes)
    assert bool(plan.fork_servers) is (said == IMPORTS_TORCH)
    assert lines(plan) == [f"start method auto: {said}"]


def test_auto_takes_a_warm_server_that_is_there_for_one_worker() -> None:
    facts = make_facts(files={"t.py": TORCH_SCRIPT}, has_warm_server=lambda: True)
    plan = planned(start_method="auto", count=1, facts=facts)
    assert lines(plan) == ["start method auto: forkserver, 1 worker that imports torch"]


@pytest.mark.parametrize("method", ["auto", "warm"])
def test_only_a_warm_server_does_without_secrets(method: str) -> None:
    """Where no warm server can be had, a fork server of the job imports with the environment of the workers."""
    environ = {"HOME": "/me", "HF_TOKEN": "secret", "SHLVL": "2"}
    facts = make_facts(files={"t.py": TORCH_SCRIPT}, environ=environ)
    [server] = planned(start_method=method, facts=facts).fork_servers
    assert environ.items() <= dict(server.env).items()
    assert server.warm is not None
    assert (server.warm.withheld, server.warm.left_out) == (("HF_TOKEN",), ("SHLVL",))
    assert server.warm.only_if_there is (method == "auto")


@pytest.mark.parametrize(
    "line, named",
    [
        ("import torch", True),
        ("import os, torch.nn as nn", True),
        ("def f():\n    from torch.distributed import init_process_group", True),
        ("import deepspeed", True),
        ("from transformers import Trainer", True),
        ("import torchless", False),
        ("from mine import torch", False),
        ("print('import torch')", False),
        ("from . import x", False),
        ("import", False),
        ("import torch\nimport", False),
        ("", False),
    ],
)
def test_imports_that_need_torch(line: str, *, named: bool) -> None:
    assert (why_no_torch(f"x = 1\n{line}\n") == "") is named


@pytest.mark.parametrize(
    "line, is_early",
    [
        ("os.environ['HF_HOME'] = '/scratch'", False),
        ("sys.path.insert(0, 'src')", False),
        ("os.environ['OMP_NUM_THREADS'] = '4'", True),
    ],
)
def test_torch_is_not_imported_before_a_script_has_said_how(line: str, *, is_early: bool) -> None:
    said = "changes what torch may read in the environment before it imports it" if is_early else ""
    assert why_no_torch(f"import os, sys\n{line}\nfrom transformers import Trainer\n") == said


@pytest.mark.parametrize(
    "text, named",
    [
        (b"\xef\xbb\xbfimport torch\n", True),
        (b"# coding: latin-1\n# \xe9\nimport torch\n", True),
        (b"# coding: no-such-one\nimport torch\n", False),
        (b"x = " + b"not " * 9000 + b"1\nimport torch\n", False),
        (b"if __name__ == '__main__':\n    import torch\n", True),
    ],
    ids=["mark", "coding", "unknown coding", "deep", "main"],
)
def test_a_text_is_judged_as_the_interpreter_reads_it(tmp_path: Path, text: bytes, *, named: bool) -> None:
    (tmp_path / "t.py").write_bytes(text)
    found = read_text(str(tmp_path / "t.py"))
    assert found is not None
    assert (why_no_torch(found) == "") is named


def test_what_was_asked_for_is_preloaded() -> None:
    (server,) = planned(preload=("numpy", "torch")).fork_servers
    assert server.preload == ("numpy", "torch")


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("flavour", ["torch", "deepspeed"])
@pytest.mark.parametrize("name", ["7", "a b", "", "a..b", "torch/nn", "LONG" * 1000 + "!"])
def test_what_is_no_module_is_refused_in_one_line(name: str, flavour: str) -> None:
    request = make_request(flavour, start_method="forkserver", preload=("torch", name))
    message = error_of(OptionError, plan_job, request, make_facts(cuda=1))
    assert_one_line(message)
    assert len(message) < 300


@pytest.mark.parametrize("flavour", ["torch", "deepspeed"])
def test_wishes_for_a_server_that_there_is_not_are_told(flavour: str) -> None:
    request = make_request(flavour, preload=("numpy",))
    planned_job = plan_job(request, make_facts(cuda=1))
    texts = [one.text for one in planned_job.notices if "hostfile" not in one.text]
    assert texts == ["--preload has no effect without --start-method forkserver"]


def test_workers_of_all_numa_nodes_share_a_server() -> None:
    facts = make_facts(numa_nodes=(NumaNode(0, (0, 1, 2, 3)), NumaNode(1, (4, 5, 6, 7))))
    (server,) = planned(count=4, facts=facts, bind="auto").fork_servers
    assert server.cpus is None


@pytest.mark.parametrize(
    "environ, is_shared",
    [
        ({"OMP_PROC_BIND": "close"}, False),
        ({"OMP_PROC_BIND": "TRUE"}, False),
        ({"OMP_PLACES": "cores"}, False),
        ({"GOMP_CPU_AFFINITY": "0-3"}, False),
        ({"OMP_PROC_BIND": " False", "OMP_PLACES": "cores"}, True),
        ({}, True),
    ],
)
def test_a_server_whose_openmp_binds_threads_has_the_cpus_of_its_workers(
    environ: dict[str, str], *, is_shared: bool
) -> None:
    """OpenMP chooses among the CPUs of the process that loads it, which is the server."""
    facts = make_facts(environ=environ)
    plan = planned(count=4, start_method="spawn", facts=facts)
    places = [(0, 1), (0, 1), (2,), (3,)]
    bound = [replace(one, cpus=cpus) for one, cpus in zip(plan.workers, places, strict=True)]
    request = make_request("torch", "t.py", nproc_per_node="4", start_method="forkserver")
    job = plan_job(request, facts).job
    plan = with_fork_servers(replace(plan, workers=tuple(bound), job=job), facts)
    served, cpus = ([0] * 4, [None]) if is_shared else ([0, 0, None, None], [(0, 1)])
    assert [worker.fork_server for worker in plan.workers] == served
    assert [server.cpus for server in plan.fork_servers] == cpus
    told = "1 fork server, ranks 2-3 executed: the workers differ in CPUs that OpenMP binds threads to"
    assert [one.text for one in plan.notices if "fork" in one.text] == ([] if is_shared else [told])
    free = planned(count=4, start_method="spawn", facts=facts)
    free = with_fork_servers(replace(free, job=job), facts)
    assert [worker.fork_server for worker in free.workers] == [0] * 4, "nobody is bound"


def test_a_task_of_one_rank_is_executed() -> None:
    """An agent for each rank would start a server for each rank."""
    plan = conducted(planned(count=4), 2, {})
    assert (plan.fork_servers, plan.workers[0].fork_server, plan.workers[0].fork_entry) == ((), None, 0)
    assert lines(plan)[-1].endswith("give --one-agent-per-node")
    whole = conducted(planned(count=4), None, {})
    assert len(whole.fork_servers) == 1


def test_the_wish_travels() -> None:
    job: Job = plan_job(make_request("torch", preload=("a",), start_method="auto"), make_facts()).job
    assert (job.start.method, job.start.preload) == ("auto", ("a",))


SECRET = (
    *("TOKEN", "HF_TOKEN", "github_token", "MYSQL_PWD", "PGPASSWORD", "SSHPASS", "KEY_PASSPHRASE"),
    *("SENTRY_DSN", "AZURE_STORAGE_CONNECTION_STRING", "DB_PASSWD", "WANDB_API_KEY", "OPENAI_APIKEY"),
    *("AWS_SECRET_ACCESS_KEY", "SSH_PRIVATE_KEY", "GOOGLE_CREDENTIALS", "REGISTRY_AUTH", "BLOB_SAS"),
    *("DB_CREDS", "SLACK_WEBHOOK_URL", "SESSION_COOKIE", "PASSWORD", "SECRET_OF_MINE", "GITHUB_PAT"),
)
NEEDED_BY_IMPORTS = (
    *("PWD", "OLDPWD", "PATH", "HOME", "LD_LIBRARY_PATH", "TOKENIZERS_PARALLELISM", "MAX_TOKENS"),
    *("SSH_AUTH_SOCK", "XAUTHORITY", "KEYMAP", "CUDA_BYPASS", "PYTHONPATH", "TORCH_PATTERN", "NCCL_SASS"),
    *("DATABASE_URL", "HTTP_PROXY"),
)
WITH_A_PASSWORD = ("postgres://me:word@host:5432/db", "http://me:w%40rd@proxy")
WITHOUT = ("https://host/a@b:c", "https://host:80/", "https://me:@host", "me:word@host", "://", "")


@pytest.mark.parametrize(
    "name, value, is_secret",
    [
        *[(name, "", True) for name in SECRET],
        *[(name, "https://user@host:80/a:b@c", False) for name in NEEDED_BY_IMPORTS],
        *[("PLACE", value, True) for value in WITH_A_PASSWORD],
        *[("PLACE", value, False) for value in WITHOUT],
    ],
)
def test_variables_may_be_secrets_by_their_name_or_by_a_password_in_a_url(
    name: str, value: str, *, is_secret: bool
) -> None:
    assert may_be_secret(name, value) is is_secret
