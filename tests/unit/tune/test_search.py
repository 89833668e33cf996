"""Decisions of the search, with made-up results."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsl._record import Record, replace
from dsl.errors import AutotuningError
from dsl.tune.config import fingerprint, read_section, without_tuning
from dsl.tune.experiment import Experiment, Resources, Result, Summary
from dsl.tune.search import count_configs, search

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ONE = Resources(nodes=1, slots_per_node=1, lanes=1, memory_bytes=None)
PROFILE: Mapping[str, float] = {"num_params": 1000, "activation_mem_per_gpu": 1}
STOPPED = Result("stopped", {}, "interrupted", 130, 0.0)
OOM = Result("oom", {}, "CUDA out of memory", 1, 1.0)


def ok(**metrics: float) -> Result:
    """A run that wrote metrics."""
    return Result("ok", metrics, "", 0, 1.0)


def crash(reason: str = "ValueError: no") -> Result:
    """A run that failed, and not for memory."""
    return Result("crash", {}, reason, 1, 1.0)


class Played(Record):
    batches: tuple[tuple[Experiment, ...], ...]
    """What it asked for, in order."""
    summary: Summary
    """What it found."""

    @property
    def best(self) -> Experiment:
        assert self.summary.best is not None
        return self.summary.best

    @property
    def ran(self) -> list[str]:
        """Names of all experiments, in order."""
        return [one.name for batch in self.batches for one in batch]

    def config(self, name: str) -> Mapping[str, object]:
        """The config of an experiment."""
        return next(one.config for batch in self.batches for one in batch if one.name == name)


def play(
    config: Mapping[str, object], answer: Callable[[Experiment], Result], resources: Resources = ONE
) -> Played:
    """Run a search to its end. Profiles are answered here, unless `answer` has something else for them."""
    steps = search(read_section(config), config, resources)
    batches: list[tuple[Experiment, ...]] = []
    results: dict[str, Result] | None = None
    while True:
        try:
            batch = next(steps) if results is None else steps.send(results)
        except StopIteration as end:
            return Played(tuple(batches), end.value)
        batches.append(batch)
        results = {one.name: answer(one) for one in batch}


def size_of(experiment: Experiment) -> int:
    """The micro batch of an experiment."""
    size = experiment.config["train_micro_batch_size_per_gpu"]
    assert isinstance(size, int)
    return size


def up_to(most: int, half: float = 5, **facts: float) -> Callable[[Experiment], Result]:
    """Answers of a model that has room for so many samples, and gets faster with each."""

    def answer(experiment: Experiment) -> Result:
        if experiment.kind == "profile":
            return ok(**{**PROFILE, **facts})
        size = size_of(experiment)
        return ok(throughput=100 * size / (size + half)) if size <= most else OOM

    return answer


needs_optuna = pytest.mark.needs_package("optuna")
MODEL_BASED = pytest.param("model_based", marks=needs_optuna)
FAST: dict[str, object] = {"max_train_micro_batch_size_per_gpu": 16, "repeats": 0}


def config(stage: object = 0, section: dict[str, object] | None = None, **more: Any) -> dict[str, object]:
    return {
        "zero_optimization": {"stage": stage},
        **more,
        "autotuning": {**FAST, **(section or {})},
    }


def test_an_experiment_has_the_whole_config_of_the_user_and_keeps_the_zero_section() -> None:
    zero = {"stage": [1, 2], "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 7}
    user = {**config(), "zero_optimization": zero, "optimizer": {"params": {"betas": [0.9, 0.99]}}}
    user["autotuning"] = {**FAST, "results_dir": "r", "exps_dir": "e", "end_profile_step": 9}
    played = play(user, up_to(8))
    assert played.config("z2_gas1_tmbspg8") == {
        "zero_optimization": {**zero, "stage": 2},
        "optimizer": {"params": {"betas": [0.9, 0.99]}},
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "train_batch_size": 8,
        "autotuning": {**FAST, "end_profile_step": 9, "enabled": True},
    }
    assert user["zero_optimization"] == zero, "the user's own config is never changed"
    profile = played.config("profile_model_info")
    assert profile["zero_optimization"] == {**zero, "stage": 3}
    assert profile["autotuning"] == {"enabled": True, "model_info": {"profile": True}}
    assert profile["train_batch_size"] == profile["train_micro_batch_size_per_gpu"] == 1


def test_the_batch_counts_all_workers_and_the_copies_that_share_them() -> None:
    resources = Resources(nodes=2, slots_per_node=4, lanes=1, memory_bytes=None)
    user = config(0, {"mp_size": 2}, gradient_accumulation_steps=3)
    played = play(user, up_to(4), resources)
    assert played.config("z0_gas3_tmbspg4")["train_batch_size"] == 4 * 3 * 8 // 2


def test_a_crash_at_the_smallest_micro_batch_ends_the_stage_with_its_reason() -> None:
    def answer(one: Experiment) -> Result:
        return crash("KeyError: 'x'") if one.space == "z0" else up_to(4)(one)

    played = play(config([0, 1]), answer)
    assert [name for name in played.ran if name.startswith("z0")] == ["z0_gas1_tmbspg1"]
    assert (
        "z0 ends: z0_gas1_tmbspg1 fails for another reason than memory: KeyError: 'x'" in played.summary.notes
    )
    assert played.best.space == "z1"


def test_too_little_memory_for_the_users_micro_batch_falls_back_on_the_smallest() -> None:
    played = play(config(train_micro_batch_size_per_gpu=8), up_to(3))
    assert played.ran[1:3] == ["z0_gas1_tmbspg8", "z0_gas1_tmbspg1"]
    assert size_of(played.best) == 3


def test_a_crash_with_a_larger_micro_batch_counts_as_too_large() -> None:
    def answer(one: Experiment) -> Result:
        result = up_to(6)(one)
        return crash("CUBLAS_STATUS_ALLOC_FAILED") if result.outcome == "oom" else result

    assert play(config(), answer).ran == play(config(), up_to(6)).ran


def test_latency_is_minimised() -> None:
    def answer(one: Experiment) -> Result:
        result = up_to(8)(one)
        return ok(latency=1 + size_of(one)) if result.outcome == "ok" and one.kind == "run" else result

    played = play(config(0, {"metric": "latency"}), answer)
    assert played.summary.is_minimised
    assert played.summary.value == 2
    assert size_of(played.best) == 1


@pytest.mark.parametrize("key", ["FLOPS", "FLOPS_per_gpu"])
@pytest.mark.parametrize("metric", ["FLOPS", "flops"])
def test_flops_are_read_under_either_name(metric: str, key: str) -> None:
    def answer(one: Experiment) -> Result:
        result = up_to(8)(one)
        return ok(**{key: 5.0 * size_of(one)}) if result.outcome == "ok" and one.kind == "run" else result

    assert play(config(0, {"metric": metric}), answer).summary.value == 40


def test_a_run_without_the_metric_or_with_no_number_did_not_run() -> None:
    for value in (float("nan"), float("inf")):
        summary = play(config(), lambda one, value=value: ok(throughput=value)).summary  # type: ignore[misc]
        assert (summary.best, summary.value) == (None, None)
        assert summary.ended.endswith("its metrics have no finite number at throughput")
    assert play(config(), lambda _: ok(other=1)).summary.best is None


def test_memory_rules_out_stages_and_nothing_runs_beyond_it() -> None:
    resources = replace(ONE, slots_per_node=8, memory_bytes=5_000)
    played = play(config("all"), up_to(500, activation_mem_per_gpu=100), resources)
    # 1000 parameters of Adam in full precision: 16 kB whole, 9 kB with divided optimizer, 2 kB all divided.
    assert {one.space for batch in played.batches for one in batch} == {"", "z3"}
    assert played.summary.notes[0].startswith("z0 is left out: it needs about 0.0 GiB")


def test_with_no_memory_known_the_section_bounds_the_search() -> None:
    played = play(config([0, 3]), up_to(100))
    assert max(size_of(one) for batch in played.batches for one in batch) == 16


def test_facts_about_the_model_replace_its_profile() -> None:
    facts = {"num_params": 1000, "hidden_size": 8, "profile": True}
    played = play(config(0, {"model_info": facts}), up_to(4), replace(ONE, memory_bytes=10**9))
    assert "profile_model_info" not in played.ran
    # DeepSpeed would take the run for a profile, which measures nothing.
    assert "model_info" not in played.best.config["autotuning"]  # type: ignore[operator]


def test_a_profile_that_fails_leaves_the_size_unknown_and_one_without_memory_ends_the_search() -> None:
    for result in (crash("AttributeError: offload"), Result("no metric", {}, "it wrote nothing", 0, 1.0)):
        played = play(config(), lambda one, result=result: result if not one.space else up_to(4)(one))  # type: ignore[misc]
        assert played.summary.best
        assert played.summary.notes == (f"the size of the model is not known: {result.reason}",)
    broken = play(config([0, 1]), lambda _: crash("SyntaxError: oops")).summary
    assert broken.ended == (
        "no config ran: z1 ends: z1_gas1_tmbspg1 fails for another reason than memory: SyntaxError: oops"
    )
    own = play({"autotuning": {"space": {"k": [1, 2]}}}, lambda _: crash("SyntaxError: oops")).summary
    assert own.ended == "no config ran: k=2: SyntaxError: oops"
    ended = play(config(), lambda one: OOM).summary
    assert len(ended.trials) == 1
    assert ended.ended == "no config ran: not even ZeRO 3 with a micro batch of 1 fits into memory"


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("most", [3, 8, 40])
def test_no_experiment_has_a_larger_batch_than_the_section_allows(steps: int, most: int) -> None:
    resources = replace(ONE, slots_per_node=2)
    user = config([0, 1], {"max_train_batch_size": most}, gradient_accumulation_steps=steps)
    played = play(user, up_to(100), resources)
    batches = [one.config["train_batch_size"] for batch in played.batches for one in batch if one.space]
    assert max(batches) <= most  # type: ignore[type-var, operator]
    listed = config(0, {"max_train_batch_size": most}, train_micro_batch_size_per_gpu=[1, 3, 9, 27])
    played = play(listed, up_to(100), resources)
    assert all(one.config["train_batch_size"] <= most for one in played.batches[-1])  # type: ignore[operator]


@pytest.mark.parametrize(
    "user, message",
    [
        (config(5), 'zero_optimization.stage: expected 0 to 3, a list of them or "all", got 5'),
        (config([]), 'zero_optimization.stage: expected 0 to 3, a list of them or "all", got'),
        ({**config(), "zero_optimization": 3}, "zero_optimization: expected an object with keys, got 3"),
        (config(0, {"max_train_batch_size": 3}), "3 is less than one sample for each of 4 workers"),
        (
            config(0, {"max_train_batch_size": 8, "min_train_micro_batch_size_per_gpu": 5}),
            "min_train_micro_batch_size_per_gpu 5 is more than max_train_batch_size leaves for each worker, 2",
        ),
        (
            config(0, {"max_train_batch_size": 8}, train_micro_batch_size_per_gpu=[9, 3]),
            "none of [9, 3] leaves a step within autotuning.max_train_batch_size 8",
        ),
        # DeepSpeed takes 1 in its place, and says so among other lines.
        (
            config(gradient_accumulation_steps=[2, 4]),
            "gradient_accumulation_steps: a list is not tried, got [2, 4]",
        ),
        (config(0, {"mp_size": 8}), "mp_size 8 does not divide the 4 workers of an experiment"),
        *[
            (
                config(train_micro_batch_size_per_gpu=listed),
                "train_micro_batch_size_per_gpu: expected whole numbers",
            )
            for listed in (["2", 4], [0], [1.5], [[2]], [True])
        ],
        *[
            (
                {**config(0, {"fast": False}), key: value},
                f"{key}: expected numbers of at most 999999999, got ",
            )
            for key in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
            for value in (10**300, [1, 10**300])
        ],
        (config(0, {"space": {"zero_optimization.stage.x": [1]}}), "leads through zero_optimization.stage"),
        (config(0, {"space": {"a": list(range(200)), "b": list(range(200))}}), "make 40000 configs"),
    ],
)
def test_what_cannot_be_tried_is_told_before_anything_runs(user: dict[str, object], message: str) -> None:
    with pytest.raises(AutotuningError) as caught:
        play(user, lambda _: pytest.fail("something ran"), replace(ONE, slots_per_node=4))
    assert message in str(caught.value)


def test_a_stopped_experiment_ends_the_search_with_what_is_known() -> None:
    full = play(config([0, 1]), up_to(12))
    assert len(full.ran) == 15
    for count in range(15):
        seen: list[str] = []

        def answer(one: Experiment, seen: list[str] = seen, count: int = count) -> Result:
            seen.append(one.name)
            return STOPPED if len(seen) > count else up_to(12)(one)

        played = play(config([0, 1]), answer)
        assert played.ran == full.ran[: len(played.ran)]
        assert played.summary.ended == "stopped before everything was tried"
        assert (played.summary.best is None) == (count < 2)


def test_near_ties_are_run_again_named_and_bounded() -> None:
    speeds = {"a": [100.0, 90.0], "b": [98.0, 97.0], "c": [97.0, 100.0], "d": [50.0], "e": [96.0, 96.5]}

    def answer(one: Experiment) -> Result:
        key = one.config["key"]
        assert isinstance(key, str)
        return ok(throughput=speeds[key][one.repeat])

    user: dict[str, object] = {"autotuning": {"space": {"key": list("abcde")}, "repeats": 1}}
    played = play(user, answer)
    assert played.ran[5:] == ["key=a_repeat1", "key=b_repeat1", "key=c_repeat1", "key=e_repeat1"]
    summary = played.summary
    assert (summary.value, summary.best and summary.best.name) == (98.5, "key=c")
    assert [(tie.name, tie.least, tie.most, tie.runs) for tie in summary.ties] == [
        ("key=c", 97, 100, 2),
        ("key=b", 97, 98, 2),
        ("key=e", 96, 96.5, 2),
        ("key=a", 90, 100, 2),
    ]
    assert [(space.name, space.configs) for space in summary.spaces] == [("space", 5)], "a config counts once"
    clear = play(user, lambda one: ok(throughput=2.0 ** "abcde".index(str(one.config["key"]))))
    assert (len(clear.ran), clear.summary.ties) == (5, ())


def test_a_repeat_never_has_the_name_of_another_config() -> None:
    user: dict[str, object] = {"autotuning": {"space": {"x": ["1", "1_repeat1"]}, "repeats": 1}}
    played = play(user, lambda _: ok(throughput=10))
    assert len(played.ran) == len(set(played.ran)) == 4


def test_a_repeat_that_fails_is_told_and_never_improves_a_config() -> None:
    def answer(one: Experiment) -> Result:
        return crash("boom") if one.repeat and one.config["k"] == 1 else ok(throughput=10)

    summary = play({"autotuning": {"space": {"k": [1, 2]}}}, answer).summary
    assert summary.notes == ("k=1_repeat1 failed, though the config ran before: boom",)
    assert summary.value == 10


def full(**section: object) -> dict[str, object]:
    zero: dict[str, object] = {"stage": [0, 1], "allgather_bucket_size": 77}
    return {
        "zero_optimization": zero,
        "gradient_clipping": [1, 2],
        "autotuning": {**FAST, "fast": False, "tuner_early_stopping": 0, **section},
    }


def grows(one: Experiment) -> Result:
    """Stage 1 has room for more, and its smaller buckets are quicker."""
    if not one.space:
        return ok(num_params=10, activation_mem_per_gpu=1)
    zero = one.config["zero_optimization"]
    assert isinstance(zero, dict)
    result = up_to(16 if zero["stage"] else 8)(one)
    bonus = 1e9 / (1e9 + zero.get("reduce_bucket_size", 1e9))
    return replace(result, metrics={key: value * (1 + bonus) for key, value in result.metrics.items()})


def test_a_full_space_has_what_the_user_said_and_what_the_stage_tunes() -> None:
    played = play(full(), grows)
    space = played.summary.spaces[-1]
    assert space.name == "z1_rbs_tmbspg"
    found = [one.config for batch in played.batches for one in batch if one.space == space.name]
    assert {one["zero_optimization"]["allgather_bucket_size"] for one in found} == {77}  # type: ignore[index]
    assert {one["gradient_clipping"] for one in found} == {1, 2}
    assert {one["zero_optimization"]["reduce_bucket_size"] for one in found} == {  # type: ignore[index]
        50_000_000,
        500_000_000,
        1_000_000_000,
    }
    assert played.best.config["zero_optimization"]["reduce_bucket_size"] == 50_000_000  # type: ignore[index]


def test_null_takes_a_key_out_of_the_full_space() -> None:
    user = full()
    user["zero_optimization"] = {"stage": 1, "reduce_bucket_size": None, "allgather_bucket_size": [1, 2]}
    played = play(user, grows)
    found = [one.config for batch in played.batches for one in batch if one.space.startswith("z1_")]
    assert found
    assert {tuple(one["zero_optimization"]) for one in found} == {("stage", "allgather_bucket_size")}  # type: ignore[arg-type]


@pytest.mark.parametrize("tuner", ["gridsearch", "random", MODEL_BASED])
def test_early_stopping_and_the_most_trials_end_a_full_space(tuner: str) -> None:
    def tried(**section: object) -> int:
        return (
            play(
                full(tuner_type=tuner, **section),
                lambda one: up_to(8)(one) if one.space != "z1" else grows(one),
            )
            .summary.spaces[-1]
            .configs
        )

    assert tried(tuner_num_trials=4) == 4
    assert 3 <= tried(tuner_early_stopping=3) < 12


@pytest.mark.parametrize("lanes", [1, 4, 5, 8])
def test_early_stopping_counts_configs_and_not_how_many_run_at_a_time(lanes: int) -> None:
    user = {"autotuning": {"space": {"k": list(range(20))}, "tuner_early_stopping": 5, "repeats": 0}}

    def answer(one: Experiment) -> Result:
        value = one.config["k"]
        assert isinstance(value, int)
        return ok(throughput=value) if value < 12 else OOM

    played = play(user, answer, replace(ONE, lanes=lanes))
    assert played.summary.value == 11
    assert 16 < len(played.ran) + lanes <= 20 + lanes


def test_a_full_space_that_is_too_large_costs_nothing_that_was_found() -> None:
    lists = {
        f"stage3_{name}": [1, 2, 3, 4] for name in ("max_live_parameters", "param_persistence_threshold")
    }
    more = {"sub_group_size": [1, 2, 3], "stage3_prefetch_bucket_size": [1, 2, 3]}
    section = {"fast": False, "tuner_num_trials": 3, "repeats": 0}
    user = {"zero_optimization": {"stage": "all", **lists, **more}, "autotuning": section}

    def answer(one: Experiment) -> Result:
        if one.kind == "profile":
            return ok(**PROFILE)
        size, stage = size_of(one), one.config["zero_optimization"]["stage"]  # type: ignore[index]
        return ok(throughput=100 * size / (size + 5) + stage) if size <= 10 + 2 * stage else OOM

    played = play(user, answer)
    assert played.summary.best
    summary = played.summary
    assert summary.ended == "all ZeRO stages that the config asks for were tried"
    (note,) = [note for note in summary.notes if "are not tuned" in note]
    assert "of z3 are not tuned: the lists of values make 20736 configs, more than 20000" in note


@pytest.mark.parametrize("tuner", ["gridsearch", "random", MODEL_BASED])
def test_a_batch_is_as_large_as_there_are_lanes_and_no_larger_than_what_is_left(tuner: str) -> None:
    user: dict[str, object] = {
        "autotuning": {"space": {"k": list(range(10))}, "tuner_type": tuner, "repeats": 0}
    }
    played = play(user, lambda one: ok(throughput=1.0 * one.config["k"]), replace(ONE, lanes=4))  # type: ignore[operator]
    assert [len(batch) for batch in played.batches] == [4, 4, 2]
    assert sorted(one.config["k"] for batch in played.batches for one in batch) == list(range(10))  # type: ignore[type-var]
    assert played.summary.ended == "all 10 configs of space were tried"


@pytest.mark.parametrize("lanes", [2, 3, 8])
@pytest.mark.parametrize("most", [1, 2, 11, 12, 16])
def test_idle_lanes_run_ahead_and_miss_nothing_that_one_lane_tries(lanes: int, most: int) -> None:
    one = play(config([0, 1]), up_to(most))
    many = play(config([0, 1]), up_to(most), replace(ONE, lanes=lanes))
    assert set(one.ran) <= set(many.ran)
    assert many.summary.value == one.summary.value
    assert len(many.batches) <= len(one.batches)
    assert max(map(len, many.batches)) <= max(lanes, 4)


def test_three_lanes_need_far_fewer_rounds_and_find_no_less() -> None:
    user = config(0, {"max_train_micro_batch_size_per_gpu": 1024})
    one, three = (play(user, up_to(3), replace(ONE, lanes=lanes)) for lanes in (1, 3))
    assert (three.summary.value or 0) >= (one.summary.value or 1)
    assert len(three.batches) <= 0.7 * len(one.batches)


def test_a_space_of_the_users_own_needs_no_deepspeed_and_reaches_into_sections() -> None:
    user: dict[str, object] = {
        "optim": {"name": "sgd"},
        "autotuning": {"space": {"batch": [8, 16], "optim.lr": [0.1, 0.2]}, "metric": "loss", "mode": "min"},
    }
    played = play(user, lambda one: ok(loss=one.config["optim"]["lr"] + 1 / one.config["batch"]))  # type: ignore[index,operator]
    assert played.ran[:4] == ["batch=8_lr=0.1", "batch=8_lr=0.2", "batch=16_lr=0.1", "batch=16_lr=0.2"]
    assert without_tuning(played.best.config) == {"optim": {"name": "sgd", "lr": 0.1}, "batch": 16}
    assert user["optim"] == {"name": "sgd"}


@needs_optuna
def test_a_model_finds_a_good_config_in_fewer_runs_than_there_are() -> None:
    values = [2**n for n in range(12)]
    user: dict[str, object] = {
        "autotuning": {
            "space": {"a": values, "b": values, "c": [True, False]},
            "tuner_type": "model_based",
            "tuner_num_trials": 60,
            "repeats": 0,
        }
    }

    def answer(one: Experiment) -> Result:
        distance = abs(values.index(one.config["a"]) - 8) + abs(values.index(one.config["b"]) - 3)
        return ok(throughput=100 - distance - (5 if one.config["c"] else 0))

    played = play(user, answer)
    assert len(played.ran) == 60
    assert played.summary.value is not None
    assert played.summary.value >= 97, "288 configs, of which 13 are as good"


@needs_optuna
@pytest.mark.parametrize("seed", range(4))
def test_a_model_decides_the_same_when_it_is_told_the_same(seed: int) -> None:
    user = full(tuner_type="model_based", seed=seed, tuner_num_trials=9)
    answers = {one.name: chance(seed)(one) for batch in play(user, grows).batches for one in batch}

    def answer(one: Experiment) -> Result:
        return answers.setdefault(one.name, grows(one))

    played = play(user, answer)
    assert play(user, lambda one: answers[one.name]) == played
    contents = [fingerprint(one.config) for batch in played.batches for one in batch if not one.repeat]
    assert len(set(contents)) == len(contents)
    others = [play(full(tuner_type="model_based", seed=one, tuner_num_trials=9), grows).ran for one in (0, 1)]
    assert others[0] != others[1]


def test_without_its_package_a_model_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    for user in (
        full(tuner_type="model_based"),
        {"autotuning": {"space": {"k": [1]}, "tuner_type": "model_based"}},
    ):
        with pytest.raises(AutotuningError, match=r"needs optuna: pip install optuna, or choose gridsearch"):
            play(user, lambda _: pytest.fail("something ran"))


SECTIONS = st.fixed_dictionaries(
    {
        "fast": st.booleans(),
        "tuner_type": st.sampled_from(["gridsearch", "random"]),
        "seed": st.integers(0, 5),
        "repeats": st.integers(0, 2),
        "max_train_micro_batch_size_per_gpu": st.integers(1, 40),
        "tuner_num_trials": st.integers(1, 12),
        "tuner_early_stopping": st.integers(0, 6),
        "mp_size": st.integers(1, 2),
        "metric": st.sampled_from(["throughput", "latency"]),
    },
    optional={
        "max_train_batch_size": st.integers(4, 60),
        "num_tuning_micro_batch_sizes": st.integers(1, 5),
        "space": st.just({"a.b": [1, 2, 3], "c": [True, False]}),
    },
)
CONFIGS = st.fixed_dictionaries(
    {
        "zero_optimization": st.fixed_dictionaries(
            {"stage": st.sampled_from([0, 1, [0, 1], [1, 3], "all"])},
            optional={"reduce_bucket_size": st.sampled_from([None, 5, [5, 6]])},
        ),
        "autotuning": SECTIONS,
    },
    optional={
        "train_micro_batch_size_per_gpu": st.sampled_from(["auto", 1, 3, 9, [1, 2], [4, 2, 4, 30]]),
        "gradient_accumulation_steps": st.sampled_from(["auto", 1, 2, 5]),
    },
)
RESOURCES = st.builds(
    Resources,
    nodes=st.integers(1, 2),
    slots_per_node=st.integers(1, 2),
    lanes=st.integers(1, 3),
    memory_bytes=st.sampled_from([None, 10_000, 17_000, 30_000]),
)


def chance(seed: int) -> Callable[[Experiment], Result]:
    """Answers that make no sense, and are always the same for an experiment."""

    def answer(one: Experiment) -> Result:
        dice = int(fingerprint(seed, one.name, without_tuning(one.config))[:8], 16)
        if one.kind == "profile" and dice % 5:
            return ok(num_params=1000, activation_mem_per_gpu=dice % 3000)
        if dice % 3 == 0:
            return [OOM, crash(), Result("timeout", {}, "too long", 137, 9.0)][dice % 9 // 3]
        return ok(throughput=dice % 97, latency=dice % 89)

    return answer


@settings(max_examples=150, deadline=None)
@given(user=CONFIGS, resources=RESOURCES, seed=st.integers(0, 10**6))
def test_no_config_runs_twice_names_differ_and_a_replay_decides_the_same(
    user: dict[str, object], resources: Resources, seed: int
) -> None:
    try:
        played = play(user, chance(seed), resources)
    except AutotuningError:
        return
    every = [one for batch in played.batches for one in batch]
    first = [fingerprint(without_tuning(one.config)) for one in every if not one.repeat]
    assert len(set(first)) == len(first)
    assert len(set(played.ran)) == len(every)
    assert play(user, chance(seed), resources) == played
    assert all("/" not in name and name not in {".", ".."} for name in played.ran)
    assert len(played.summary.trials) == len(every)
    bests = [space.value for space in played.summary.spaces if space.value is not None]
    # If a repeated run fails, a near-tie of another space may take the place of the best.
    all_repeated = all(one.value is not None for one in played.summary.trials if one.experiment.repeat)
    if bests and all_repeated:
        assert played.summary.value == (min(bests) if played.summary.is_minimised else max(bests))
    for one, after in pairwise(played.summary.ties):
        assert one.runs >= 1
        assert after.least <= after.most


LISTS: dict[str, object] = {
    "comms_logger": {"enabled": True, "prof_ops": ["all_reduce", "all_gather"]},
    "torch_autocast": {
        "enabled": True,
        "lower_precision_safe_modules": ["torch.nn.Linear", "torch.nn.Conv2d"],
    },
    "data": {"files": ["a", "b"]},
    "tags": ["a", "b"],
}


@pytest.mark.parametrize("fast", [True, False])
def test_a_list_is_what_to_try_only_where_deepspeed_takes_one_value(*, fast: bool) -> None:
    zero: dict[str, object] = {
        "stage": [1],
        "leaf_module": {"classes": ["A", "B"]},
        "reduce_bucket_size": [3, 4],
    }
    user = {**full(fast=fast), **LISTS, "zero_optimization": zero}
    played = play(user, grows)
    for batch in played.batches:
        for one in batch:
            assert {key: one.config[key] for key in LISTS} == LISTS
            own = one.config["zero_optimization"]
            assert isinstance(own, dict)
            assert own["leaf_module"] == {"classes": ["A", "B"]}
            assert own["reduce_bucket_size"] in ((3,) if fast else (3, 4))
            assert one.config["gradient_clipping"] in ((1,) if fast else (1, 2))
    assert {key: played.best.config[key] for key in LISTS} == LISTS


def test_configs_of_a_space_share_no_section() -> None:
    user: dict[str, object] = {"autotuning": {"space": {"a": [{"x": {"y": 1}}], "b": [1, 2]}, "repeats": 0}}
    first, second = [
        one.config["a"] for batch in play(user, lambda _: ok(throughput=1)).batches for one in batch
    ]
    assert first == second == {"x": {"y": 1}}
    assert first is not second


@pytest.mark.parametrize(
    "most, ended",
    [(2, "2 of 3 configs of space were tried (tuner_num_trials)"), (3, "all 3 configs of space")],
)
def test_a_space_that_was_tried_whole_is_said_to_be(most: int, ended: str) -> None:
    tuned = {"autotuning": {"tuner_num_trials": most, "repeats": 0, "space": {"n": [1, 2, 3]}}}
    played = play(tuned, lambda one: ok(throughput=float(str(one.config["n"]))))
    assert played.summary.ended.startswith(ended)


def test_the_best_config_has_the_samples_that_were_asked_for() -> None:
    def answer(one: Experiment) -> Result:
        return ok(latency=float(str(one.config["train_batch_size"])))

    section = {"metric": "latency", "min_train_batch_size": 64, "max_train_micro_batch_size_per_gpu": 4}
    found = play(config(0, section), answer)
    assert found.best.config["train_batch_size"] == 64
    assert found.summary.spaces[0].best == found.best.name
    # Where nothing else runs, what ran is the best.
    assert play(config(0, section), lambda one: answer(one) if size_of(one) == 1 else OOM).summary.best


def test_a_config_that_fails_when_it_is_run_again_gives_way_to_one_as_good() -> None:
    def answer(one: Experiment) -> Result:
        if one.repeat and one.config["n"] in failing:
            return OOM
        return ok(throughput=float(str(one.config["n"])))

    tuned = {"autotuning": {"repeats": 2, "space": {"n": [50, 98, 99, 100]}}}
    failing = [100]
    assert play(tuned, answer).best.config["n"] == 99
    # Where all that are as good have failed, too, the best one stays.
    failing = [98, 99, 100]
    assert play(tuned, answer).best.config["n"] == 100


@pytest.mark.parametrize(
    "section, count",
    [
        ({"space": {"a": [1, 2, 2], "b": [1, 2, 3]}}, 6),
        ({"space": {"a": [1, 2], "b": [1, 2, 3]}, "tuner_num_trials": 4, "tuner_type": "random"}, 4),
        ({"space": {"a": [1, 2]}, "tuner_early_stopping": 2}, None),
        ({}, None),
    ],
)
def test_how_many_configs_will_be_tried_is_known_where_no_result_decides(
    section: dict[str, object], count: int | None
) -> None:
    config = {"a": 0, "b": 0, "autotuning": {"repeats": 0, "metric": "value", **section}}
    assert count_configs(read_section(config)) == count
    if count is not None:
        assert len(play(config, lambda _: ok(value=1.0)).ran) == count
