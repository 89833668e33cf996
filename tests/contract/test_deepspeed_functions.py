"""The functions users import and the variables that travel, against those of DeepSpeed 0.19.8 (the goldens say how each answer was got)."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from tests.contract.golden_file import cases
from tests.support.machine import make_facts, numa_table

from dsl import runner
from dsl.binding import NodeGroup, place
from dsl.binding.rules import CPU_LIMIT, parse_core_list
from dsl.devices import ACCELERATORS
from dsl.devices.offered import count_numa_nodes
from dsl.errors import DslError
from dsl.machine.kernel import Topology
from dsl.model.request import PlacementRequest
from dsl.plan.remote import remote_variables
from dsl.resources.exports import MARK
from dsl.words import format_ranges


def _check(answer: dict[str, Any], call: Any, *args: Any) -> None:
    if "error" in answer:
        with pytest.raises(DslError) as caught:
            call(*args)
        assert isinstance(caught.value, getattr(builtins, answer["error"])), args
    else:
        assert call(*args) == answer["result"], args


def test_hostfiles() -> None:
    for lines, answer in cases("hostfile"):
        _check(answer, lambda text: [list(pair) for pair in runner._parse_hostfile(text).items()], lines)


def test_filters() -> None:
    for pool, include, exclude, answer in cases("filters"):

        def call(include: str, exclude: str, pool: dict[str, int]) -> list[Any]:
            return [
                [host, list(slots)]
                for host, slots in runner.parse_inclusion_exclusion(pool, include, exclude).items()
            ]

        _check(answer, call, include, exclude, dict(pool))


def test_world_info_byte_for_byte() -> None:
    for world, text in cases("world_info"):
        assert runner.encode_world_info(world) == text


def test_the_world_info_of_the_documentation() -> None:
    assert runner.encode_world_info({"localhost": [0, 1]}) == "eyJsb2NhbGhvc3QiOiBbMCwgMV19"


def test_core_lists() -> None:
    for text, answer in cases("core_lists"):
        no_such_cpu = max(answer.get("result", [0])) >= CPU_LIMIT
        _check({"error": "ValueError"} if no_such_cpu else answer, parse_core_list, text)


@pytest.mark.parametrize(
    "case", cases("binding"), ids=lambda case: f"{len(case[0])} nodes, {case[1]}, {case[2]} ranks"
)
def test_binding(case: list[Any]) -> None:
    """numactl's arguments ``-m NODES``, ``-p NODE`` and ``-C CORES`` are our memory policy and cpus."""
    table, core_list, count, share, words = case
    # 8 physical cores of two threads each, the second of core N being cpu N + 8.
    topology = Topology(numa_table(*table), tuple((core, core + 8) for core in range(8)))
    wish = PlacementRequest(bind_cores_to_rank=True, core_list=core_list)
    facts = make_facts(allowed=range(16), topology=topology)
    if share is None:
        with pytest.raises(DslError):
            place(wish, NodeGroup(count, {}), facts)
        return
    bindings = place(wish, NodeGroup(count, {}), facts).bindings
    assert {len(binding.cpus) for binding in bindings} == {share}
    ours = []
    for binding in bindings:
        mode, nodes = binding.mempolicy or ("", ())
        option = {"bind": "-m ", "preferred": "-p "}.get(mode, "")
        memory = f"{option}{','.join(map(str, nodes))} " if nodes else ""
        ours.append(f"{memory}-C {format_ranges(binding.cpus)}")
    assert ours == words


def test_workers_of_a_cpu_node() -> None:
    for table, count in cases("cpu_devices"):
        assert count_numa_nodes(numa_table(*table)) == count, table


# Env files that DeepSpeed refuses with a traceback, or takes the quotation marks of.
OURS: dict[tuple[str, ...], dict[str, str]] = {
    ("A=1\n\nB=2\n",): {"A": "1", "B": "2"},
    ("# note\n",): {},
    ("A=b # c\nB='q'\nC=$HOME\nD=\n",): {"A": "b # c", "B": "q", "C": f"{MARK}HOME{MARK}", "D": ""},
}
PLACES = {"HOME": "/home/me/.deepspeed_env", "CWD": "CWD/.deepspeed_env", "ABSOLUTE": "/ABSOLUTE"}


@pytest.mark.parametrize("case", cases("exports"), ids=lambda case: f"{case[0]} {len(case[1])} {case[2]}")
def test_what_travels(case: list[Any]) -> None:
    accelerator, env, files, answer = case
    own = env.get("DS_ENV_FILE")
    environ = {
        **env,
        "DS_ACCELERATOR": accelerator,
        **({"DS_ENV_FILE": "/ABSOLUTE"} if own == "ABSOLUTE" else {}),
    }
    places = {**PLACES, "HOME/my.env": "/home/me/my.env", "CWD/my.env": "CWD/my.env"}
    texts = {places[name]: text for name, text in files.items()}
    facts = make_facts(environ=environ, files=texts, cwd="CWD")
    found = dict(remote_variables((), facts)[0])
    key = tuple(files.values())
    expected = {"PYTHONPATH": "CWD", **OURS[key]} if key in OURS else answer["result"]
    assert found == expected
    assert (key in OURS) <= (answer.get("result") != expected)


def test_all_accelerators_were_asked() -> None:
    assert {case[0] for case in cases("exports")} == set(ACCELERATORS)
