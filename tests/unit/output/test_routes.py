"""Routes, prefixes and stdin: every rule on facts that the test makes up."""

from __future__ import annotations

import contextlib
import string
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import OptionError
from dsl.machine import Console
from dsl.model.job import INHERIT, Route
from dsl.model.request import OutputRequest
from dsl.output import (
    OutputPlan,
    Shown,
    needs_run_dir,
    parse_words,
    plan_output,
    run_dirs,
    without_files,
)
from dsl.output.grammar import fill_template, parse_local_ranks, parse_streams
from dsl.output.plugin import StreamFile, StreamFiles, WorkerFiles, with_stream_files

if TYPE_CHECKING:
    from collections.abc import Sequence


PIPE = Console("other", "other")
TERMINAL = Console("terminal", "terminal")
RUN = "/logs/run"


def _plan(
    count: int,
    console: Console = PIPE,
    environ: dict[str, str] | None = None,
    *,
    ranks: Sequence[int] = (),
    world_size: int = 0,
    **asked: object,
) -> OutputPlan:
    request = OutputRequest(**asked)  # type: ignore[arg-type]
    ranks = ranks or range(count)
    run_dir = RUN if needs_run_dir(request) else None
    shown = Shown(ranks, world_size or len(ranks), environ or {}, run_dir=run_dir)
    return plan_output(request, shown, console)


def test_a_worker_that_is_alone_has_our_own_streams() -> None:
    assert _plan(1) == OutputPlan(((INHERIT, INHERIT),), ("",), 0)
    terminal = Route(inherit=True, terminal=True)
    assert _plan(1, TERMINAL) == OutputPlan(((terminal, terminal),), ("",), 0)
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}>"}
    assert _plan(1, PIPE, template).routes == ((INHERIT, INHERIT),)
    told = _plan(1, PIPE, template, template="<${rank}>")
    assert (told.routes, told.prefixes) == (_plan(1, tag="always").routes, ("<0>",))
    assert told.routes != ((INHERIT, INHERIT),)


def test_several_workers_share_the_console_line_by_line() -> None:
    assert _plan(2).routes == ((Route(console=1), Route(console=2)),) * 2


def test_streams_that_lead_to_one_place_are_one() -> None:
    one = Console("other", "other", is_one=True)
    shown = (Route(console=1), None)
    assert _plan(2, one).routes == (shown,) * 2
    assert _plan(1, one).routes == ((INHERIT, INHERIT),)
    assert _plan(1, one, tag="always").routes == (shown,)
    relayed = Console("other", "other", is_relayed=True, is_one=True)
    assert _plan(1, relayed).routes == (shown,)
    assert _plan(2, one, local_ranks="1").routes == ((Route(), Route()), shown)


def test_streams_that_also_go_to_files_or_are_searched_stay_two() -> None:
    one = Console("other", "other", is_one=True)
    options: tuple[Any, ...] = (
        {"log_dir": "/logs"},
        {"tee": "2"},
        {"redirects": "1"},
        {"stderr_words": "loss"},
    )
    for asked in options:
        assert all(stderr is not None for _, stderr in _plan(2, one, **asked).routes), asked


def test_on_a_terminal_the_workers_see_one() -> None:
    (routes, _) = _plan(2, Console("terminal", "other")).routes
    assert routes == (Route(console=1, terminal=True), Route(console=2))


def test_nobody_stands_before_a_stream_that_is_thrown_away() -> None:
    (routes, _) = _plan(2, Console("null", "other")).routes
    assert routes == (INHERIT, Route(console=2))


def test_a_tag_that_was_asked_for_needs_the_engine() -> None:
    plan = _plan(1, tag="always")
    assert (plan.routes, plan.prefixes) == (((Route(console=1), Route(console=2)),), ("[rank 0] ",))


def _files(local_rank: int) -> tuple[str, str]:
    base = f"{RUN}/attempt_0/{local_rank}"
    return f"{base}/stdout.log", f"{base}/stderr.log"


def test_a_log_directory_alone_keeps_and_shows() -> None:
    plan = _plan(2, log_dir="/logs")
    out, err = _files(1)
    assert plan.routes[1] == (Route(out, 1), Route(err, 2))
    assert run_dirs(RUN, 0, 2) == (RUN, f"{RUN}/attempt_0", f"{RUN}/attempt_0/0", f"{RUN}/attempt_0/1")


@pytest.mark.parametrize(
    "redirects, tee, expected",
    [
        ("3", "", ("file", "file")),
        ("1", "", ("file", "shown")),
        ("2", "1", ("both", "file")),
        ("3", "3", ("both", "both")),
        ("", "2", ("shown", "both")),
        ("0:3", "", ("file", "file")),
        ("1:3", "", ("shown", "shown")),
        ("0", "0", ("shown", "shown")),
    ],
)
def test_redirects_and_tee_of_rank_0(redirects: str, tee: str, expected: tuple[str, str]) -> None:
    routes = _plan(2, log_dir="/logs", redirects=redirects, tee=tee).routes[0]
    wanted = []
    for stream, (how, path) in enumerate(zip(expected, _files(0), strict=True), start=1):
        shown = stream if how != "file" else None
        prefix = "[default0]:" if how == "both" else None
        wanted.append(Route(path if how != "shown" else None, shown, prefix=prefix))  # type: ignore[arg-type]
    assert list(routes) == wanted


def test_a_worker_that_is_alone_keeps_its_streams_where_nothing_is_asked_of_them() -> None:
    assert _plan(1, log_dir="/logs", redirects="2").routes == ((INHERIT, Route(_files(0)[1])),)


def test_the_console_can_be_left_to_some_ranks() -> None:
    plan = _plan(3, local_ranks="0,2,9")
    assert [routes[0] for routes in plan.routes] == [Route(console=1), Route(), Route(console=1)]
    kept = _plan(3, log_dir="/logs", local_ranks="0").routes[1]
    assert kept == (Route(_files(1)[0]), Route(_files(1)[1]))


@pytest.mark.parametrize(
    "asked, seen",
    [
        ({"global_ranks": "0,9-10"}, [False, True, True, False]),
        ({"global_ranks": "9-10", "local_ranks": "0,2"}, [False, False, True, False]),
        ({"global_ranks": "0-7,12-99"}, [False] * 4),
    ],
)
def test_the_console_can_be_left_to_some_global_ranks(asked: dict[str, Any], seen: list[bool]) -> None:
    plan = _plan(0, ranks=(8, 9, 10, 11), world_size=16, log_dir="/logs", **asked)
    assert [stdout.console is not None for stdout, _ in plan.routes] == seen
    assert [stdout.path for stdout, _ in plan.routes] == [_files(local)[0] for local in range(4)]


def test_the_ranks_of_the_attempt_count() -> None:
    attempts = [_plan(0, ranks=ranks, world_size=4, global_ranks="2") for ranks in ((0, 1), (2, 3))]
    assert [plan.routes[0][0].console for plan in attempts] == [None, 1]


def test_a_worker_that_a_plug_in_shows_is_hidden_by_its_global_rank() -> None:
    request = without_files(OutputRequest(logs_specs="mine", local_ranks="0", global_ranks="5"))
    ours = plan_output(request, Shown((4, 5), 8, {}), PIPE)
    files = [WorkerFiles(StreamFile("/a", is_shown=True), StreamFile(on_console=True), None, {})] * 2
    made = with_stream_files(ours, StreamFiles(tuple(files)), PIPE)
    assert [[one.console for one in pair if one] for pair in made.routes] == [[None, None], [1, 2]]


@pytest.mark.parametrize("asked", [{"stdin": "5"}, {}])
def test_the_worker_that_reads_a_terminal_is_shown_whatever_its_rank(asked: dict[str, Any]) -> None:
    console = Console("terminal", "terminal", stdin_is_terminal=True)
    plan = _plan(0, console, ranks=(4, 5, 6), world_size=8, global_ranks="6", **asked)
    assert plan.stdin == (1 if asked else 2)
    assert [stdout.console for stdout, _ in plan.routes] == [None, 1 if asked else None, 1]


def test_each_rank_logs_join_both_streams() -> None:
    request = OutputRequest()
    made = plan_output(request, Shown(range(2), 2, {}, each_rank_logs=("/a", "/b")), PIPE)
    assert made.routes == ((Route("/a"), None), (Route("/b"), None))


@pytest.mark.parametrize(
    "asked, shown",
    [
        ({"tee": "3"}, (True, True)),
        ({"tee": "2"}, (True, True)),
        ({"tee": "1:1"}, (False, True)),
        ({"tee": "0"}, (False, False)),
        ({"tee": "3", "local_ranks": "0"}, (True, False)),
        ({"tee": "1", "tag": "always"}, (True, True)),
    ],
)
def test_joined_streams_are_shown_as_one(asked: dict[str, str], shown: tuple[bool, bool]) -> None:
    request = OutputRequest(**asked)  # type: ignore[arg-type]
    made = plan_output(request, Shown(range(2), 2, {}, each_rank_logs=("/a", "/b")), PIPE)
    prefixes = (None, None) if request.tag == "always" else ("[default0]:", "[default1]:")
    assert made.routes == tuple(
        (Route(path, 1, prefix=prefix) if show else Route(path), None)
        for path, show, prefix in zip(("/a", "/b"), shown, prefixes, strict=True)
    )


def test_words_make_a_file_for_each_stream_that_has_some() -> None:
    plan = _plan(1, stdout_words="a,,b,c", stderr_words=",")
    assert plan.line_files == ((1, f"{RUN}/attempt_0/filtered_stdout.log", ("a,b", "c")),)
    assert plan.routes == ((Route(console=1), Route(console=2)),), "somebody has to look at the lines"


def test_lines_of_a_hidden_rank_have_the_prefix_of_tee_where_all_ranks_share_a_file() -> None:
    plan = _plan(2, log_dir="/logs", tee="1", stdout_words="loss", local_ranks="0")
    assert [stdout.prefix for stdout, _ in plan.routes] == ["[default0]:", "[default1]:"]
    assert [stdout.console for stdout, _ in plan.routes] == [1, None]


def test_words_leave_the_files_of_a_log_directory_as_they_are() -> None:
    plain = _plan(2, log_dir="/logs")
    assert _plan(2, log_dir="/logs", stdout_words="loss").routes == plain.routes
    assert _plan(2, stdout_words="loss").routes == ((Route(console=1), Route(console=2)),) * 2


def test_words_are_looked_for_in_a_stream_that_is_thrown_away() -> None:
    """An empty route is not our own stream: the engine reads it, because of the words."""
    routes = _plan(2, Console("null", "null"), stdout_words="loss").routes
    assert routes == ((Route(), INHERIT),) * 2


@pytest.mark.parametrize(
    "asked, expected",
    [
        ({}, False),
        ({"redirects": "0", "tee": "0"}, False),
        ({"redirects": "3"}, True),
        ({"tee": "0:1"}, True),
        ({"log_dir": "/logs", "tee": "0"}, True),
        ({"stderr_words": "x"}, True),
    ],
)
def test_a_directory_is_made_where_files_are_asked_for(asked: dict[str, str], *, expected: bool) -> None:
    assert needs_run_dir(OutputRequest(**asked)) is expected  # type: ignore[arg-type]


COLOUR = {"TERM": "xterm"}


@pytest.mark.parametrize(
    "console, environ, tag, tagged, coloured",
    [
        (TERMINAL, COLOUR, "auto", True, True),
        (TERMINAL, {}, "auto", True, False),
        (TERMINAL, {"TERM": "dumb"}, "auto", True, False),
        (TERMINAL, {**COLOUR, "NO_COLOR": "1"}, "auto", True, False),
        (TERMINAL, COLOUR, "never", False, False),
        (Console("terminal", "null"), COLOUR, "auto", True, True),
        (Console("terminal", "other"), COLOUR, "auto", True, False),
        (Console("other", "terminal"), COLOUR, "auto", False, False),
        (PIPE, COLOUR, "auto", False, False),
        (PIPE, COLOUR, "always", True, False),
        (PIPE, {"FORCE_COLOR": "1"}, "always", True, True),
        (TERMINAL, {"FORCE_COLOR": "1", "TERM": "dumb"}, "auto", True, True),
        (TERMINAL, {"FORCE_COLOR": ""}, "auto", True, False),
        (PIPE, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, "always", True, False),
    ],
)
def test_when_lines_have_a_tag_and_a_colour(
    console: Console, environ: dict[str, str], tag: str, *, tagged: bool, coloured: bool
) -> None:
    prefixes = _plan(3, console, environ, tag=tag).prefixes
    assert all(bool(prefix) is tagged for prefix in prefixes)
    assert all(("\x1b[" in prefix) is coloured for prefix in prefixes)
    if coloured:
        assert len({prefix[:5] for prefix in prefixes}) == 3, "a colour each"
        assert all(prefix.endswith("\x1b[0m ") for prefix in prefixes)


def test_a_tag_that_also_goes_to_a_file_has_no_colour() -> None:
    assert _plan(2, TERMINAL, COLOUR, stdout_words="loss").prefixes == ("[rank 0] ", "[rank 1] ")


def test_tags_are_as_wide_as_the_widest() -> None:
    plan = _plan(0, ranks=(8, 9, 10), world_size=16, tag="always")
    assert plan.prefixes == ("[rank  8] ", "[rank  9] ", "[rank 10] ")


def test_torchruns_template_is_a_wish_for_tags() -> None:
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/${local_rank} $other>"}
    assert _plan(0, environ=environ, ranks=(4, 5), world_size=8).prefixes == (
        "<default 4/0 $other>",
        "<default 5/1 $other>",
    )


@pytest.mark.parametrize("console", [PIPE, TERMINAL])
def test_what_is_teed_has_torchruns_prefix_wherever_it_goes(console: Console) -> None:
    """Recorded of torchrun 2.15: `--tee 0:1,1:2 --role trainer` tags stdout of rank 0 and stderr of rank 1."""
    request = OutputRequest(tee="0:1,1:2", redirects="2:3")
    shown = Shown(range(3), 3, {"TERM": "xterm"}, "trainer", run_dir=RUN)
    plan = plan_output(request, shown, console)
    routes = [route for pair in plan.routes for route in pair if route is not None]
    assert [route.prefix for route in routes] == ["[trainer0]:", None, None, "[trainer1]:", None, None]
    assert all(bool(prefix) is (console is TERMINAL) for prefix in plan.prefixes)


@pytest.mark.parametrize(
    "asked, environ",
    [
        ({"tee": "3", "tag": "never"}, {}),
        ({"tee": "3", "tag": "always"}, {}),
        ({"log_dir": "/logs"}, {}),
        ({"redirects": "3"}, {}),
        ({"tee": "3"}, {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${rank}>"}),
        ({"tee": "3"}, {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": ""}),
    ],
)
def test_another_wish_for_tags_goes_before_that_of_tee(
    asked: dict[str, str], environ: dict[str, str]
) -> None:
    request = OutputRequest(**asked)  # type: ignore[arg-type]
    plan = plan_output(request, Shown(range(2), 2, environ, run_dir=RUN), PIPE)
    assert [route.prefix for pair in plan.routes for route in pair if route] == [None] * 4


def test_joined_streams_and_those_of_a_plug_in_are_teed_too() -> None:
    joined = plan_output(OutputRequest(tee="0:1"), Shown(range(2), 2, {}, each_rank_logs=("/a", "/b")), PIPE)
    assert joined.routes == ((Route("/a", console=1, prefix="[default0]:"), None), (Route("/b"), None))
    ours = plan_output(without_files(OutputRequest(logs_specs="mine")), Shown(range(1), 1, {}), PIPE)
    shown = StreamFile("/l/a", is_shown=True)
    made = with_stream_files(ours, StreamFiles((WorkerFiles(shown, StreamFile("/l/b"), None, {}),)), PIPE)
    assert made.routes == ((Route("/l/a", console=1, prefix="[default0]:"), Route("/l/b")),)


@pytest.mark.parametrize(
    "text, ranks, world_size, expected",
    [
        ("", (0,), 1, 0),
        ("", (0, 1), 2, 0),
        ("", (4, 5), 8, 0),
        ("none", (0,), 1, None),
        ("1", (0, 1), 2, 1),
        ("5", (4, 5), 8, 1),
        ("3", (4, 5), 8, None),
    ],
)
def test_who_reads_stdin(text: str, ranks: tuple[int, ...], world_size: int, expected: int | None) -> None:
    assert _plan(0, ranks=ranks, world_size=world_size, stdin=text).stdin == expected


@pytest.mark.parametrize(
    "asked, stdin, shown",
    [
        ({}, 0, [True, True, True]),
        ({"local_ranks": "0,2"}, 0, [True, False, True]),
        ({"local_ranks": "1,2"}, 1, [False, True, True]),
        ({"local_ranks": "1", "stdin": "2"}, 2, [False, True, True]),
        ({"local_ranks": "1", "stdin": "none"}, None, [False, True, False]),
        ({"local_ranks": "9"}, 0, [False, False, False]),
    ],
)
def test_the_worker_that_reads_a_terminal_is_shown(
    asked: dict[str, Any], stdin: int | None, shown: list[bool]
) -> None:
    """Nobody could answer a prompt that is hidden. A pipe goes to the first worker, hidden or not."""
    plan = _plan(3, Console("terminal", "terminal", stdin_is_terminal=True), **asked)
    assert plan.stdin == stdin
    assert [stdout != Route() for stdout, _ in plan.routes] == shown
    if "stdin" not in asked:
        assert _plan(3, TERMINAL, **asked).stdin == 0


@pytest.mark.parametrize("text", ["2", "-1", "all", "\u0663", "9" * 5000])
def test_a_rank_that_does_not_exist_cannot_read_stdin(text: str) -> None:
    with pytest.raises(OptionError, match="0 to 1, or none"):
        _plan(2, stdin=text)


def test_files_of_a_plug_in_replace_ours_and_the_console_stays_as_it_was() -> None:
    asked = OutputRequest(log_dir="/logs", tee="3", local_ranks="0", stdout_words="loss", tag="always")
    rest = without_files(asked)
    assert (rest.log_dir, rest.tee, rest.local_ranks, rest.stdout_words) == (None, "", "", "loss")
    console = Console("terminal", "null")
    ours = plan_output(rest, Shown(range(2), 2, {}, run_dir=RUN), console)
    shown, nowhere = StreamFile("/l/a", is_shown=True), StreamFile()
    files = StreamFiles(
        (WorkerFiles(shown, shown, None, {}), WorkerFiles(nowhere, StreamFile(on_console=True), None, {})),
        filtered_stdout="/l/some",
    )
    made = with_stream_files(ours, files, console)
    assert made.routes == (
        (Route("/l/a", console=1, terminal=True), Route("/l/a")),
        (Route(), ours.routes[1][1]),
    )
    assert made.line_files == ((1, "/l/some", ("loss",)),)
    assert (made.prefixes, made.stdin) == (ours.prefixes, ours.stdin)


def test_a_template_without_a_variable_stays_as_it_is() -> None:
    assert fill_template("plain", "default", 1, 2, "h") == "plain"
    assert fill_template("$hostname:$${rank}:${rank} ", "default", 1, 2, "h") == "h:${rank}:1 "
    assert fill_template("${host}/${local_rank} ${hosts}", "default", 1, 2, "n-3") == "n-3/2 ${hosts}"
    assert fill_template("$${time} ${time}|", "default", 1, 2, "h") == "${time} HH:MM:SS.mmm|"


@pytest.mark.parametrize(
    "text, message",
    [
        ("4", "expected 0, 1, 2 or 3"),
        ("x", "expected 0, 1, 2 or 3"),
        ("0:7", "not '0:7'"),
        ("0:1,", "not ''"),
        ("0:1,0:2", "local rank 0 is there twice"),
        ("-1:1", "not '-1:1'"),
        ("\u0661:1", "expected"),
        ("0-3:1", "not '0-3:1'"),
        ("rank:1", "not 'rank:1'"),
        ("rank3-1:1", "not 'rank3-1:1'"),
        ("ranks3:1", "not 'ranks3:1'"),
        ("rank3:4", "not 'rank3:4'"),
        ("rank0-7:1,3:1,rank5-9:3", "rank 5 is there twice"),
        (f"rank0-{'9' * 5000}:1", "expected"),
        (f"{'9' * 5000}:1", "expected"),
    ],
)
def test_a_bad_stream_map_is_one_line(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        parse_streams(text, "--tee")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--tee")


@given(st.dictionaries(st.integers(0, 5000), st.integers(0, 3), min_size=1))
def test_a_stream_map_says_what_was_written(streams: dict[int, int]) -> None:
    for word in ("", "rank"):
        parsed = parse_streams(",".join(f"{word}{rank}:{value}" for rank, value in streams.items()), "-r")
        other = max(streams) + 1
        places = {rank: (other, rank) if word else (rank, other) for rank in streams}
        assert {rank: parsed(*place) for rank, place in places.items()} == streams
        assert parsed(other, other) == 0


def test_a_global_rank_counts_before_a_local_one() -> None:
    parsed = parse_streams("0:1,rank8-9:2,rank4:0,1:3", "-r")
    assert [parsed(*place) for place in ((0, 0), (1, 1), (0, 4), (0, 8), (1, 9), (1, 10), (2, 11))] == [
        *(1, 3, 0, 2, 2, 3, 0)
    ]


def test_files_are_for_the_ranks_that_the_maps_name() -> None:
    asked: dict[str, Any] = {"log_dir": "/logs", "redirects": "0:2", "tee": "rank5:3"}
    routes = _plan(0, ranks=(4, 5), world_size=8, **asked).routes
    shown = Route(console=1)
    out, err = _files(1)
    assert routes[0] == (shown, Route(_files(0)[1]))
    assert routes[1] == (Route(out, 1, prefix="[default1]:"), Route(err, 2, prefix="[default1]:"))
    joined = Shown((4, 5), 8, {}, each_rank_logs=("/a", "/b"))
    made = plan_output(OutputRequest(tee="rank5:1"), joined, PIPE)
    assert [stdout.console for stdout, _ in made.routes] == [None, 1]


@given(st.text(alphabet=string.printable, max_size=12))
def test_any_text_is_a_map_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(OptionError):
        assert parse_streams(text, "-r")(0, 0) in {0, 1, 2, 3}


def test_a_list_of_local_ranks() -> None:
    assert parse_local_ranks("0, 12,3,0") == {0, 12, 3}


@pytest.mark.parametrize("text, fault", [("0,a", "a"), (",", ""), ("0,,1", ""), ("-1", "-1"), ("0:1", "0:1")])
def test_a_bad_list_of_local_ranks_is_one_line(text: str, fault: str) -> None:
    """torchrun refuses an empty item, too: it would hide everything."""
    with pytest.raises(OptionError, match=f"--local-ranks-filter '{text}': .*not '{fault}'"):
        parse_local_ranks(text)


def test_two_commas_are_one_in_a_word() -> None:
    assert parse_words("x,,y,z,") == ("x,y", "z")
    assert parse_words("") == ()
