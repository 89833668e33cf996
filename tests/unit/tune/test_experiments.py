"""How a tuner places, names and remembers experiments, with commands that nobody runs."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dsl._record import Record, replace
from dsl.agent.warm import HeldServers
from dsl.model.job import Host
from dsl.model.request import Program, Request, SignalRequest
from dsl.tune.config import Section, find_config
from dsl.tune.experiment import Done, Experiment, Resources, Result, Summary
from dsl.tune.folders import Folders
from dsl.tune.run import Tuner
from dsl.tune.setup import Setup, UserWords

ARGS = ("--note", "a b", "--deepspeed_config", "c.json")


class Order(Record):
    """An experiment that was started."""

    name: str
    """Its name."""
    words: tuple[str, ...]
    """The words behind ``dsl``."""


class FakeRunners:
    """Says of each experiment that it ended well, with metrics, when it is waited for."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.envs: list[Mapping[str, str]] = []
        self.waiting: list[Order] = []
        self.signals: list[list[int]] = []
        self.stops: list[bool] = []
        self.most = 0
        self.suspensions = 0
        self.codes: list[int] = []
        """How the next ones end, if not well."""
        self.bell: list[int] = []
        """Signals that have come, for whom nobody has waited."""

    def heard(self) -> list[int]:
        told, self.bell = self.bell, []
        return told

    @property
    def running(self) -> int:
        return len(self.waiting)

    def start(self, name: str, words: tuple[str, ...], _folder: str, env: Mapping[str, str]) -> None:
        order = Order(name, words)
        self.orders.append(order)
        self.envs.append(env)
        self.waiting.append(order)
        self.most = max(self.most, len(self.waiting))
        section = config_of(order)["autotuning"]
        with open(section.get("metric_path") or section["model_info_path"], "w", encoding="utf-8") as file:
            file.write('{"throughput": 2, "num_params": 3}')

    def wait(self) -> tuple[list[Done], list[int]]:
        if self.signals:
            return [], self.signals.pop(0)
        code = self.codes.pop(0) if self.codes else 0
        return [Done(self.waiting.pop(0).name, 143 if self.stops else code, 1.0)], []

    def stop(self, *, at_once: bool = False) -> None:
        self.stops.append(at_once)

    def suspend(self) -> None:
        self.suspensions += 1


class Progress:
    """Hears which experiments were known."""

    def __init__(self) -> None:
        self.reused: list[str] = []
        self.pauses: list[bool] = []

    def began(self, experiment: Experiment) -> None:
        pass

    def ended(self, experiment: Experiment, result: Result, *, is_reused: bool) -> None:
        if is_reused:
            self.reused.append(experiment.name)

    def pause(self) -> None:
        self.pauses.append(True)

    def go_on(self) -> None:
        self.pauses.append(False)


def config_of(order: Order) -> Any:
    word = next(one for one in order.words if one.startswith("ey") or one.endswith(".json"))
    text = Path(word).read_text() if word.endswith(".json") else base64.urlsafe_b64decode(word)
    return json.loads(text)


WORDS = (("launcher", "--launcher=ssh"), ("num_gpus", "--num_gpus=1"), ("hostfile", "--hostfile=hosts"))


def a_setup(
    *more: tuple[str, str], args: tuple[str, ...] = ARGS, grace_s: float = 3.0, **fields: Any
) -> Setup:
    setup = Setup(
        user=UserWords((*WORDS, *more)),
        request=Request("deepspeed", Program("script", "t.py", args), signals=SignalRequest(grace_s=grace_s)),
        config=find_config(args),
        section=Section(),
        size=Resources(1, 1, 4, None),
        hosts=(Host("localhost", (1, 3, 5, 7)),),
        is_uniform=True,
        servers=(),
        environ={"HOME": "/root"},
    )
    return replace(setup, **fields)


def experiments(count: int) -> tuple[Experiment, ...]:
    return tuple([Experiment(f"n={n}", {"n": n, "autotuning": {}}, "run", "space") for n in range(count)])


def one_batch(
    batch: tuple[Experiment, ...], seen: dict[str, Result]
) -> Generator[Any, Mapping[str, Result], Summary]:
    seen.update((yield batch))
    return Summary("throughput", False, None, None, (), (), (), "done")


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    made = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    yield made
    made.close()


def tuned(
    folders: Folders, setup: Setup, runners: FakeRunners, count: int = 4
) -> tuple[dict[str, Result], Progress]:
    seen: dict[str, Result] = {}
    progress = Progress()
    steps = one_batch(experiments(count), seen)
    Tuner(setup, folders, runners, HeldServers(), progress).run(steps, next(steps))  # type: ignore[arg-type]
    return seen, progress


def options(order: Order) -> list[str]:
    return list(order.words[: order.words.index("t.py")])


def test_each_experiment_has_words_slots_and_a_port_of_its_own(folders: Folders) -> None:
    runners = FakeRunners()
    seen, _ = tuned(folders, a_setup(), runners, 6)
    assert {one.outcome for one in seen.values()} == {"ok"}
    assert runners.most == 4
    first = [options(order) for order in runners.orders[:4]]
    assert [words[:4] for words in first] == [
        ["--launcher=ssh", "--grace=3", "--hostfile=hosts", f"--include=localhost:{slot}"]
        for slot in (1, 3, 5, 7)
    ]
    assert {words[4] for words in first} == {"--master_port=0"}
    assert all(order.words[-4:-1] == ("--note", "a b", "--deepspeed_config") for order in runners.orders)
    assert [config_of(order)["n"] for order in runners.orders] == list(range(6))
    assert ARGS == ("--note", "a b", "--deepspeed_config", "c.json")


def test_on_other_hosts_the_first_of_an_experiment_chooses_the_port(folders: Folders) -> None:
    runners = FakeRunners()
    hosts = (Host("a", (0, 2)), Host("b", (4, 6)), Host("c", (1,)))
    size = Resources(2, 1, 2, None)
    setup = a_setup(("master_addr", "--master_addr=10.0.0.1"), hosts=hosts, size=size)
    tuned(folders, setup, runners, 2)
    where = [
        [word for word in options(order) if "include" in word or "master" in word] for order in runners.orders
    ]
    assert where == [
        ["--include=a:0@b:4", "--master_addr=10.0.0.1", "--master_port=0"],
        ["--include=a:2@b:6", "--master_addr=10.0.0.1", "--master_port=0"],
    ]
    away = setup.place_words((Host("b", (4,)), Host("c", (1,))))
    assert away == ("--hostfile=hosts", "--include=b:4@c:1")


def test_devices_with_names_are_shown_by_their_names(folders: Folders) -> None:
    runners = FakeRunners()
    hosts = (Host("localhost", (0, 1)),)
    visible = ("CUDA_VISIBLE_DEVICES", ("GPU-a", "GPU-b"))
    tuned(folders, a_setup(hosts=hosts, size=Resources(1, 1, 2, None), visible=visible), runners, 2)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in runners.envs] == ["GPU-a", "GPU-b"]
    assert not any("include" in word for order in runners.orders for word in options(order))


def test_an_experiment_that_takes_everything_has_the_words_of_the_user(folders: Folders) -> None:
    runners = FakeRunners()
    tuned(folders, a_setup(("master_port", "--master_port=7"), size=Resources(1, 4, 1, None)), runners, 1)
    assert options(runners.orders[0]) == [
        *("--launcher=ssh", "--grace=3", "--num_gpus=1", "--hostfile=hosts", "--master_port=7"),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"grace_s": 2.5},
        {"args": ("--note", "c", "--deepspeed_config", "c.json")},
        {"script_digest": "other"},
        {"device": "cuda, A100"},
        {"size": Resources(1, 2, 2, None)},
        {"section": Section(results_dir="elsewhere", seed=7)},
        {"environ": {}},
        {"user": UserWords((*WORDS, ("master_port", "--master_port=7")))},
    ],
)
def test_what_is_known_counts_for_the_same_content_alone(folders: Folders, change: dict[str, Any]) -> None:
    tuned(folders, a_setup(), FakeRunners())
    runners = FakeRunners()
    _, progress = tuned(folders, a_setup(**change), runners)
    is_same = not {"grace_s", "args", "script_digest", "device", "size"} & set(change)
    assert len(progress.reused) == (4 if is_same else 0)
    assert len(runners.orders) == (0 if is_same else 4)


def test_another_mapping_makes_other_experiments(folders: Folders) -> None:
    tuned(folders, a_setup(), FakeRunners())
    runners = FakeRunners()
    tuned(folders, a_setup(section=Section(arg_mappings=(("n", "--micro"),))), runners)
    assert len(runners.orders) == 4
    assert [order.words[-2:] for order in runners.orders] == [("--micro", str(n)) for n in range(4)]


@pytest.mark.parametrize("option, is_known", [("--deepspeed_config", True), ("--config", False)])
def test_metrics_of_a_killed_run_count_only_where_they_are_written_once(
    folders: Folders, option: str, *, is_known: bool
) -> None:
    setup = a_setup(args=(option, "c.json"))
    runners = FakeRunners()
    runners.signals = [[15]]
    tuned(folders, setup, runners, 1)
    again = FakeRunners()
    tuned(folders, setup, again, 1)
    assert len(again.orders) == (0 if is_known else 1)


def test_a_signal_stops_what_runs_and_a_second_one_kills_it(folders: Folders) -> None:
    runners = FakeRunners()
    runners.signals = [[15], [15]]
    seen, _ = tuned(folders, a_setup(), runners, 6)
    assert runners.stops == [False, True]
    assert {one.outcome for one in seen.values()} == {"stopped"}
    assert len(seen) == 6
    assert len(runners.orders) == 4
    again = FakeRunners()
    # They had written their metrics, and count as ended, as after any end of the tuner.
    _, progress = tuned(folders, a_setup(), again, 6)
    assert (len(progress.reused), len(again.orders)) == (4, 2)


def test_a_signal_ends_a_tuning_of_which_everything_is_known(folders: Folders) -> None:
    """Nobody waits then, and `run` would train."""
    tuned(folders, a_setup(), FakeRunners())
    runners = FakeRunners()
    runners.bell = [15]
    steps = one_batch(experiments(4), {})
    tuner = Tuner(a_setup(), folders, runners, HeldServers(), Progress())  # type: ignore[arg-type]
    tuner.run(steps, next(steps))
    assert (tuner.signals, runners.orders) == ([15], [])


def test_nothing_is_started_after_a_signal_that_came_while_nobody_waited(folders: Folders) -> None:
    runners = FakeRunners()
    runners.bell = [2]
    seen, _ = tuned(folders, a_setup(), runners)
    assert runners.orders == []
    assert {one.outcome for one in seen.values()} == {"stopped"}


def test_what_stood_still_is_run_again_and_nothing_else_changes(folders: Folders) -> None:
    runners = FakeRunners()
    runners.signals = [[signal.SIGTSTP]]
    seen, progress = tuned(folders, a_setup(), runners, 6)
    assert (runners.suspensions, progress.pauses) == (1, [True, False])
    # Four ran then; they are run once more, behind the others.
    assert [config_of(order)["n"] for order in runners.orders] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert {result.outcome for result in seen.values()} == {"ok"}
    assert len(seen) == 6


@pytest.mark.parametrize(
    "kind, codes, outcome, runs",
    [
        *[(kind, [134, 134, 0], "crash", 2) for kind in ("run", "profile")],
        ("profile", [], "ok", 1),  # it has told what it has to
    ],
)
def test_what_fails_after_it_stood_still_is_run_again_once(
    folders: Folders, kind: Any, codes: list[int], outcome: str, runs: int
) -> None:
    """Whoever has waited for it may have given it up meanwhile."""
    runners = FakeRunners()
    runners.signals = [[signal.SIGTSTP]]
    runners.codes = codes
    seen: dict[str, Result] = {}
    steps = one_batch((replace(experiments(1)[0], kind=kind),), seen)
    Tuner(a_setup(), folders, runners, HeldServers(), Progress()).run(steps, next(steps))  # type: ignore[arg-type]
    assert ([result.outcome for result in seen.values()], len(runners.orders)) == ([outcome], runs)


def test_what_stood_still_and_cannot_be_run_again_is_not_known(folders: Folders) -> None:
    runners = FakeRunners()
    runners.signals = [[signal.SIGTSTP], [15]]
    runners.stop = lambda *, at_once=False: runners.stops.append(at_once) if at_once else None  # type: ignore[method-assign]
    seen, _ = tuned(folders, a_setup(), runners)
    assert {result.outcome for result in seen.values()} == {"stopped"}
    again = FakeRunners()
    _, progress = tuned(folders, a_setup(), again)
    assert (progress.reused, len(again.orders)) == ([], 4), "nor by the next command"
