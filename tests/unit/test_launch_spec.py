"""Launch specs as values: they give back what they were made of, and are equal if they mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsl import LaunchSpec, SpecError, Stdio, WorkerSpec

STREAMS = {
    "Stdio.inherit()": Stdio.inherit(),
    "Stdio.null()": Stdio.null(),
    "Stdio.file('/f')": Stdio.file(Path("/f")),
    "Stdio.file('/f', append=True)": Stdio.file(b"/f", append=True),
    "Stdio.fd(3)": Stdio.fd(3),
    "Stdio.fd(4)": Stdio.fd(4),
    "Stdio.pipe()": Stdio.pipe(),
    "Stdio.stdout()": Stdio.stdout(),
    "Stdio.log(None)": Stdio.log(),
    "Stdio.log('/l', console=1)": Stdio.log("/l", console=1),
    "Stdio.log('/l', console=2, terminal=True)": Stdio.log("/l", console=2, terminal=True),
    "Stdio.log('/l', prefix=b'[0]:')": Stdio.log("/l", prefix="[0]:"),
}
WORKER: dict[str, tuple[Any, Any]] = {
    "env": ({"A": "1", "B": "\udcff"}, {"A": "1", "B": "\udcff"}),
    "cwd": (Path("/tmp"), "/tmp"),
    "stdin": (Stdio.inherit(), Stdio.inherit()),
    "stdout": (Stdio.pipe(), Stdio.pipe()),
    "stderr": (Stdio.stdout(), Stdio.stdout()),
    "cpus": ((2, 3), [2, 3]),
    "mempolicy": (("interleave", (0, 1)), ("interleave", [0, 1])),
    "foreground": (True, True),
    "keep_fds": ((7, 3), [7, 3]),
    "prefix": ("[\u00e9] ", "[\u00e9] ".encode()),
}
GROUP: dict[str, tuple[Any, Any]] = {
    "env": ({"A": "1"}, {"A": "1"}),
    "on_failure": ("report", "report"),
    "grace_s": (2.5, 2.5),
    "signal_scope": ("rank", "rank"),
    "binding": ("cpus_required", "cpus_required"),
    "log_max_bytes": (1 << 20, 1 << 20),
    "collapse": (True, True),
    "partial_after_s": (None, None),
    "relayed": (True, True),
    "tells_first_output": (True, True),
    "inherits": (True, True),
    "tells_signals": (True, True),
    "import_throttle": (3, 3),
    "line_files": ([(2, Path("/f"), ["x", b"\xff"])], [(2, "/f", [b"x", b"\xff"])]),
}


def worker(**changes: Any) -> WorkerSpec:
    return WorkerSpec(["prog", b"\xff"], **changes)


def group(**changes: Any) -> LaunchSpec:
    return LaunchSpec([worker(), worker()], **{"env": {}, **changes})


def test_a_stream_shows_the_call_that_makes_it_and_differs_from_all_others() -> None:
    assert [repr(stream) for stream in STREAMS.values()] == list(STREAMS)
    for text, stream in STREAMS.items():
        assert stream == eval(text)
        assert [other for other, one in STREAMS.items() if one == stream] == [text]
        assert text.startswith(f"Stdio.{stream.kind}(")


def test_a_stream_gives_back_what_it_was_made_of() -> None:
    def facts(stream: Stdio) -> tuple[object, ...]:
        return stream.path, stream.append, stream.descriptor, stream.console, stream.terminal

    assert Stdio.log(prefix=b"\xff").prefix == b"\xff"
    assert (Stdio.log().prefix, Stdio.pipe().prefix) == (None, None)

    assert facts(Stdio.file("/f", append=True)) == ("/f", True, None, None, False)
    assert facts(Stdio.fd(3)) == (None, False, 3, None, False)
    assert facts(Stdio.log(b"/\xff", console=2, terminal=True)) == ("/\udcff", False, None, 2, True)
    assert facts(Stdio.pipe()) == (None, False, None, None, False)


@pytest.mark.parametrize("name", WORKER)
def test_a_worker_gives_back_each_field_and_differs_by_it(name: str) -> None:
    given, held = WORKER[name]
    one = worker(**{name: given})
    assert getattr(one, name) == held
    assert one == worker(**{name: given})
    assert one != worker()
    assert f"{name}=" in repr(one)
    assert f"{name}=" not in repr(worker())


@pytest.mark.parametrize("name", GROUP)
def test_a_group_gives_back_each_field_and_differs_by_it(name: str) -> None:
    given, held = GROUP[name]
    one = group(**{name: given})
    assert getattr(one, name) == held
    assert one == group(**{name: given})
    assert one != group()
    assert f"{name}=" in repr(one)
    assert f"{name}=" not in repr(group())


def test_a_group_gives_back_its_workers() -> None:
    one, other = worker(), worker(cpus=[1])
    spec = LaunchSpec([one, other], env={})
    assert spec.workers == [one, other]
    assert one.argv == ["prog", "\udcff"]
    assert spec != LaunchSpec([other, one], env={})
    assert spec != LaunchSpec([one], env={})


def test_defaults_are_what_the_constructors_say() -> None:
    plain, spec = worker(), group()
    assert (plain.env, plain.cwd, plain.cpus, plain.mempolicy, plain.prefix) == ({}, None, [], None, b"")
    assert (plain.stdin, plain.stdout, plain.stderr) == (Stdio.null(), Stdio.inherit(), Stdio.inherit())
    assert (spec.on_failure, spec.grace_s, spec.binding, spec.log_max_bytes) == (
        "stop",
        30.0,
        "required",
        None,
    )


def test_the_environment_of_a_group_is_ours_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    assert LaunchSpec([worker()]).env["OURS"] == "1"


def test_the_order_of_variables_does_not_matter() -> None:
    assert worker(env={"A": "1", "B": "2"}) == worker(env={"B": "2", "A": "1"})
    assert group(env={"A": "1", "B": "2"}) == group(env={"B": "2", "A": "1"})


def test_the_order_of_kept_descriptors_does_not_matter() -> None:
    assert worker(keep_fds=[7, 3]) == worker(keep_fds=[3, 7])


@pytest.mark.parametrize(
    "fds, message",
    [
        ((2,), "0 to 2 are the standard streams"),
        ((-1,), "descriptor -1"),
        ((7, 3, 7), "7 is to be kept twice"),
    ],
)
def test_only_descriptors_beside_the_standard_streams_can_be_kept_and_each_once(
    fds: tuple[int, ...], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        LaunchSpec([worker(keep_fds=fds)], env={})


def test_no_value_of_a_variable_is_shown() -> None:
    spec = LaunchSpec([worker(env={"TOKEN": "secret"})], env={"A": "secret", "B": "secret"})
    assert repr(spec) == "LaunchSpec([WorkerSpec(['prog', '\\udcff'], env=<1 variable>)], env=<2 variables>)"


@pytest.mark.parametrize("value", [Stdio.null(), worker(), group()], ids=["stdio", "worker", "group"])
def test_values_that_can_be_large_have_no_hash(value: object) -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(value)
    assert value != 1
