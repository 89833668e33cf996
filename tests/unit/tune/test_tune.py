"""What experiments have in common: the options of the user in words of their own, and the slots that there are."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.options import ROWS

from dsl._record import replace
from dsl.cli import deepspeed
from dsl.cli.deepspeed import option_words
from dsl.cli.options_deepspeed import COMMAND_LINE
from dsl.devices.nvidia import Device, Survey
from dsl.errors import AutotuningError, HostfileError, UsageError
from dsl.facts import this_machine
from dsl.model.job import Host
from dsl.model.request import ElasticRequest
from dsl.plan.hosts import ActiveHosts
from dsl.tune.experiment import Experiment, Summary
from dsl.tune.folders import Folders
from dsl.tune.run import keep_memory, run_search, save_optimal
from dsl.tune.setup import (
    REPLACED,
    WARM,
    Setup,
    SlotGroup,
    SlotPool,
    UserWords,
    as_filter,
    count_lanes,
    device_memory,
    digest_of,
    name_devices,
    set_up,
)

SAMPLES = {dest: word for dest, (word, _, _) in ROWS["dsl"].items()}
ONE_VALUE = {"fork_server_per"}
"""Options that have no value but the default."""


@pytest.mark.parametrize(
    "dest", [option.dest for option in COMMAND_LINE.options if option.dest not in ONE_VALUE]
)
def test_every_option_has_words_that_mean_the_same(dest: str) -> None:
    option = next(one for one in COMMAND_LINE.options if one.dest == dest)
    name = next(name for name in option.names if name[:2] == "--")
    words = ["--elastic_training", f"{name}={SAMPLES[dest]}" if SAMPLES[dest] else name]
    _, options = deepspeed.read([*words, "t.py", "--x", "a b"], {})
    given = UserWords(option_words(options))
    again = given.without()
    _, read = deepspeed.read([*again, "t.py", "--x", "a b"], {})
    assert vars(read) == vars(options)
    assert any(one.partition("=")[0] in option.names for one in again)
    assert not any(one.partition("=")[0] in option.names for one in given.without(dest))
    assert {one.partition("=")[0] for one in given.only(dest)} <= {*option.names}


@pytest.mark.parametrize(
    "words",
    [
        "--grace 0.0005",
        "--partial-after never",
        "--partial-after 0",
        "--launcher pdsh",
        "--master_port 29500",
        "--launcher_args=-x",
        "--hostfile=--odd",
        "--log-max-size 100M",
        "--wrap 0:nice --wrap 1:env",
        "--num_nodes 1:3 --elastic_training --master_addr m",
        "--include=a:1,2@b",
    ],
)
def test_values_are_read_again_as_they_were(words: str) -> None:
    _, options = deepspeed.read([*shlex.split(words), "t.py"], {})
    _, read = deepspeed.read([*UserWords(option_words(options)).without(), "t.py"], {})
    assert vars(read) == vars(options)


def test_what_is_not_given_has_no_words() -> None:
    _, options = deepspeed.read(["t.py"], {})
    assert option_words(options) == ()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, and on PATH, with an ssh."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "ssh").write_text("")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "t.py").write_text("")
    (tmp_path / "c.json").write_text(json.dumps({"autotuning": {"space": {"lr": [1, 2]}}}))
    return tmp_path


def local_hosts(*slots: int, visible: str | None = None) -> ActiveHosts:
    """This machine with these slots."""
    return ActiveHosts((Host("localhost", slots),), 0, "", accelerator="cuda", visible_devices=visible)


def tuned(hosts: str, words: str = "", **environ: str) -> Setup:
    """What `set_up` makes of a command line in the folder."""
    with open("hosts", "w", encoding="utf-8") as file:
        file.write(hosts)
    line = [*shlex.split(words), "-H", "hosts", "--autotuning", "tune", "t.py"]
    line += ["--deepspeed_config", "c.json"]
    request, options = deepspeed.read(line, {})
    facts = this_machine()
    facts.environ = {"PATH": "/bin:/usr/bin", **environ}
    setup, _, _ = set_up(replace(request, elastic=ElasticRequest()), UserWords(option_words(options)), facts)
    return setup


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "hosts, words, size",
    [
        ("localhost slots=4", "", (1, 4, 1)),
        ("localhost slots=4", "--num_gpus 1", (1, 1, 4)),
        ("localhost slots=4", "--num_gpus 3", (1, 3, 1)),
        ("localhost slots=4", "-i localhost:1,3", (1, 2, 1)),
        ("a slots=4\nb slots=4", "--launcher ssh", (2, 4, 1)),
        ("a slots=4\nb slots=4", "--launcher ssh --num_gpus 2", (2, 2, 2)),
        ("a slots=4\nb slots=4", "--launcher ssh --num_nodes 1", (1, 4, 2)),
        ("a slots=1\nb slots=3\nc slots=3", "--launcher ssh", (3, 1, 1)),
        ("a slots=4\nb slots=4\nc slots=6", "--launcher ssh -i a:0,1@c:4,5", (2, 2, 1)),
    ],
)
def test_the_size_of_an_experiment_is_that_of_the_job(
    hosts: str, words: str, size: tuple[int, int, int], tmp_path: Path
) -> None:
    setup = tuned(hosts, words, PATH=str(tmp_path))
    assert (setup.size.nodes, setup.size.slots_per_node, setup.size.lanes) == size


@pytest.mark.usefixtures("folder")
def test_the_training_has_the_size_that_was_tuned_for(tmp_path: Path) -> None:
    uneven = tuned("a slots=1\nb slots=3\n", "--launcher ssh", PATH=str(tmp_path))
    assert uneven.own_words() == ("--hostfile=hosts", "--include=a:0@b:0")
    even = tuned("a slots=2\nb slots=2\n", "--launcher ssh --master_port 7", PATH=str(tmp_path))
    assert even.own_words() == ("--hostfile=hosts", "--master_port=7")


@pytest.mark.parametrize("accelerator, device", [("cuda", "cuda, A100, H100"), ("cpu", "cpu"), ("", "")])
def test_devices_are_known_by_their_models_where_they_are_the_slots(accelerator: str, device: str) -> None:
    survey = Survey((Device("0", model="H100"), Device("1", model="A100"), Device("2", model="H100")))
    facts: Any = SimpleNamespace(devices=SimpleNamespace(survey=survey))
    assert name_devices(ActiveHosts((), 0, "", accelerator=accelerator), facts) == device


@pytest.mark.parametrize(
    "hosts, memory",
    [
        (local_hosts(0, 1), 30),
        (local_hosts(1), 80),
        (local_hosts(2), 60),
        (local_hosts(0, visible="GPU-b"), 80),
        (replace(local_hosts(0), is_remote=True), None),
        (replace(local_hosts(0), accelerator="cpu"), None),
    ],
)
def test_what_others_use_on_a_device_does_not_count(hosts: ActiveHosts, memory: int | None) -> None:
    """The least that is free on those that experiments get; the third device does not say."""
    survey = Survey(
        tuple(
            [
                Device(name, f"GPU-{name}", index=at, memory_bytes=size, free_bytes=free)
                for at, (name, size, free) in enumerate((("a", 90, 30), ("b", 90, 80), ("c", 60, None)))
            ]
        )
    )
    facts: Any = SimpleNamespace(devices=SimpleNamespace(survey=survey))
    assert device_memory(hosts, 9, None, facts) == memory
    assert device_memory(hosts, 9, 7, facts) == 7


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "words, visible, memory",
    [
        ("", None, 5),
        ("--num_gpus 3", None, 80),  # 0 to 2
        ("--num_gpus 2", None, 5),  # two at a time: 0 and 1, 2 and 3
        ("--num_gpus 1", "1,0,2", 60),
        ("--num_gpus 2", "1,2,3", 80),  # the job takes 1 and 2, and so does an experiment
    ],
)
def test_memory_is_that_of_the_devices_that_experiments_get(
    words: str, visible: str | None, memory: int
) -> None:
    free = {0: 60, 1: 80, 2: 90, 3: 5} if visible else {0: 80, 1: 80, 2: 80, 3: 5}
    devices = [Device(str(at), f"GPU-{at}", index=at, memory_bytes=90, free_bytes=free[at]) for at in free]
    request, options = deepspeed.read([*shlex.split(words), "t.py", "--deepspeed_config", "c.json"], {})
    facts = this_machine()
    facts.environ = {"PATH": "/bin:/usr/bin", "DS_ACCELERATOR": "cuda"}
    if visible is not None:
        facts.environ["CUDA_VISIBLE_DEVICES"] = visible
    survey: Any = SimpleNamespace(survey=Survey(tuple(devices)), cuda_count=len(free), other_name=None)
    facts.devices = survey
    setup, _, _ = set_up(replace(request, elastic=ElasticRequest()), UserWords(option_words(options)), facts)
    assert setup.size.memory_bytes == memory


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("words", ["--num_nodes 1", "--num_nodes 1 --start-method forkserver"])
def test_experiments_on_other_hosts_are_not_those_of_a_local_job(words: str, tmp_path: Path) -> None:
    """The job itself would run here alone, as the first host of the file is this one."""
    setup = tuned("localhost slots=2\nother slots=2", f"--launcher ssh {words}", PATH=str(tmp_path))
    assert setup.size.lanes == 2
    assert (setup.servers, setup.start_words) == ((), ())


@pytest.mark.usefixtures("folder")
def test_a_tuning_that_goes_on_decides_with_the_memory_with_which_it_began() -> None:
    setup, other = tuned("localhost slots=2"), tuned("localhost slots=2", "--num_gpus 1")

    def decides_with(
        setup: Setup, memory_bytes: int | None, *, ends: str = "", **config: object
    ) -> int | None:
        setup = replace(setup, size=replace(setup.size, memory_bytes=memory_bytes))
        folders = Folders("results", "exps")
        kept = keep_memory(setup, config, folders).size.memory_bytes
        folders.mark(is_finished=bool(ends))
        if ends == "well":
            folders.save_optimal({}, "")
        elif ends == "empty":
            folders.empty()
            folders.mark(is_finished=True)
        folders.close()
        return kept

    assert decides_with(setup, 60) == 60
    assert decides_with(setup, 50, ends="well") == 60
    assert decides_with(setup, 40) == 60, "with run after tune, too"
    given = replace(setup, section=replace(setup.section, device_memory=40))
    assert decides_with(given, 40) == 40
    assert decides_with(setup, 40) == 60
    assert decides_with(setup, 40, lr=2) == 40, "of another config"
    assert decides_with(other, None, lr=2) is None, "of another size"
    assert decides_with(other, 40, ends="empty", lr=2) is None
    assert decides_with(other, 30, lr=2) == 30, "with overwrite"
    assert decides_with(other, 20, ends="badly", lr=2) == 30
    assert decides_with(other, 20, lr=2) == 20, "nothing ran well"


@pytest.mark.usefixtures("folder")
def test_an_experiment_keeps_the_options_of_the_user_but_for_what_a_training_needs() -> None:
    words = "--launcher ssh --ssh_port 7 --venv_script v --bind_cores_to_rank --module --no_local_rank "
    setup = tuned("localhost slots=2", words + "--max-restarts 3 --grace 90 --stdin 1 --save_pid")
    kept = ["--launcher=ssh", "--ssh_port=7", "--venv_script=v", "--bind_cores_to_rank", "--module"]
    kept += ["--no_local_rank"]
    assert sorted(setup.trial_words) == sorted([*kept, "--grace=3"])
    training = ["--max-restarts=3", "--grace=90", "--stdin=1", "--save_pid"]
    assert sorted(setup.user.without(*REPLACED)) == sorted([*kept, *training])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "hosts, words, config, kind, message",
    [
        ("localhost slots", "", "", HostfileError, "bad entry"),
        ("localhost slots=2", "", "{", AutotuningError, "c.json: "),
        ("localhost slots=2", "", "{}", AutotuningError, "autotuning"),
        ("localhost slots=2", "", '{"a": 1, "a": 2}', AutotuningError, "duplicate key"),
        ("localhost slots=2", "--num_gpus 3", "", UsageError, "--num_gpus 3 is too many"),
    ],
)
def test_what_cannot_be_tuned_is_said_before_anything_runs(
    hosts: str, words: str, config: str, kind: type[Exception], message: str, folder: Path
) -> None:
    if config:
        (folder / "c.json").write_text(config)
    with pytest.raises(kind, match=message):
        tuned(hosts, words)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "words, start_words, stay_s",
    [
        ("", None, 0.0),
        ("--start-method auto", None, 0.0),  # the script does not import torch
        ("--start-method forkserver", WARM, 0.0),
        ("--start-method forkserver --log-dir logs", WARM, 0.0),
        ("--start-method warm --warm-for 20", (), 20.0),
    ],
)
def test_experiments_that_are_forked_share_servers(
    words: str, start_words: tuple[str, ...] | None, stay_s: float
) -> None:
    setup = tuned("localhost slots=2", f"--num_gpus 1 {words}")
    if start_words is None:
        assert (setup.servers, setup.start_words) == ((), ())
    else:
        (server,) = setup.servers
        assert server.warm is not None
        assert server.warm.stay_s == stay_s
        assert setup.start_words == start_words


@pytest.mark.usefixtures("folder")
def test_what_the_user_should_know_of_the_job_is_told_by_its_tuning() -> None:
    line = shlex.split("--num_gpus 1 --preload json --autotuning tune t.py --config c.json")
    request, options = deepspeed.read(line, {})
    _, _, notices = set_up(
        replace(request, elastic=ElasticRequest()), UserWords(option_words(options)), this_machine()
    )
    assert "--preload has no effect without --start-method forkserver" in [one.text for one in notices]


NOTHING = Summary("throughput", False, None, None, (), (), (), "done")


def test_an_optimum_of_an_earlier_tuning_does_not_stay_where_nothing_ran(folder: Path) -> None:
    setup, folders = tuned("localhost slots=2"), Folders("results", "exps")
    best = Experiment("lr=1", {"lr": 1, "autotuning": {}}, "run", "space")
    written = ("ds_config_optimal.json", "cmd_optimal.txt")
    assert save_optimal(setup, best, folders)
    assert all((folder / "results" / name).exists() for name in written)
    assert [save_optimal(setup, None, folders) for _ in range(2)] == [(), ()]
    assert not any((folder / "results" / name).exists() for name in written)
    folders.close()


@pytest.mark.usefixtures("folder")
def test_a_signal_after_the_last_experiment_is_not_lost() -> None:
    """`run` would go on to the training."""

    def steps() -> Any:
        yield ()
        os.kill(os.getpid(), signal.SIGTERM)
        return NOTHING

    search: Any = steps()
    nobody: Any = None
    before = signal.getsignal(signal.SIGTERM)
    summary, signals = run_search(search, next(search), tuned("localhost slots=2"), nobody, nobody)
    assert (summary, signals) == (NOTHING, [signal.SIGTERM])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("plain.py", "pack/__init__.py", "pack/inner.py", "pack/sub/__main__.py", "space/in/deep.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit('{name} was run')")
    return tmp_path


@pytest.mark.parametrize(
    "name, file",
    [
        ("plain.py", "plain.py"),
        ("plain", "plain.py"),
        ("pack.inner", "pack/inner.py"),
        ("pack.sub", "pack/sub/__main__.py"),
        ("space.in.deep", "space/in/deep.py"),
    ],
)
def test_a_script_or_module_is_known_by_its_content(sources: Path, name: str, file: str) -> None:
    before = digest_of(name)
    assert before
    (sources / file).write_text("pass")
    assert digest_of(name) not in ("", before)


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    "name", ["", "pack", "pack.absent", "plain.inner", "absent", "a..b", "a-b", "/", "pack/"]
)
def test_what_cannot_be_found_has_no_content(name: str) -> None:
    assert digest_of(name) == ""


def test_a_module_is_found_where_python_would_find_it(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert digest_of("plain") == ""
    monkeypatch.setenv("PYTHONPATH", f":{sources}")
    assert digest_of("plain")


def hosts(**slots: tuple[int, ...]) -> list[Host]:
    return [Host(name, some) for name, some in slots.items()]


@pytest.mark.parametrize(
    "pool, nodes, each, lanes",
    [
        (hosts(a=(0, 1, 2, 3)), 1, 1, 4),
        (hosts(a=(0, 1, 2, 3)), 1, 3, 1),
        (hosts(a=(0, 1, 2, 3), b=(0, 1, 2, 3)), 2, 2, 2),
        (hosts(a=(0,), b=(0, 1, 2), c=(0, 1, 2)), 3, 1, 1),
        (hosts(a=(0,), b=(0, 1, 2), c=(0, 1, 2)), 2, 1, 3),
        (hosts(a=(0,), b=(0, 1, 2), c=(0, 1, 2)), 1, 2, 2),
        (hosts(a=(0, 1)), 1, 3, 0),
    ],
)
def test_as_many_experiments_run_as_there_is_room_for(
    pool: list[Host], nodes: int, each: int, lanes: int
) -> None:
    assert count_lanes(pool, nodes, each) == lanes


def test_an_experiment_gets_the_real_slots_of_a_filter() -> None:
    slots = SlotPool(hosts(w0=(2, 5), w2=(4, 7)), 2, 1)
    first, second = slots.take(), slots.take()
    assert [group and as_filter(group) for group in (first, second)] == ["w0:2@w2:4", "w0:5@w2:7"]
    assert slots.take() is None


def test_what_an_experiment_gives_back_another_one_takes() -> None:
    slots = SlotPool(hosts(a=(3, 1)), 1, 1)
    first, second = slots.take(), slots.take()
    assert first is not None
    assert second is not None
    slots.give_back(first)
    assert slots.take() == (Host("a", (3,)),)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_no_slot_is_ever_given_to_two(sizes: list[int], nodes: int, each: int, random: object) -> None:
    pool = [Host(f"h{index}", tuple(range(10, 10 + size))) for index, size in enumerate(sizes)]
    slots = SlotPool(pool, nodes, each)
    held: list[SlotGroup] = []
    for _ in range(30):
        if held and random.random() < 0.4:  # type: ignore[attr-defined]
            slots.give_back(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        elif (place := slots.take()) is not None:
            held.append(place)
        taken = [(host.name, slot) for place in held for host in place for slot in host.slots]
        assert len(taken) == len(set(taken)) == len(held) * nodes * each
    while held:
        slots.give_back(held.pop())
    # Taken greedily, as many fit as the hosts have room for at all.
    room = [size // each for size in sizes]
    most = max(k for k in range(40) if sum(min(one, k) for one in room) >= nodes * k)
    assert count_lanes(pool, nodes, each) == most
