"""What a worker's last output says of its end, from texts that real programs wrote."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.evidence.excerpt import Excerpt, excerpt
from dsl.words import printable

pytestmark = pytest.mark.guarantee("G3")

PLAIN = """\
Traceback (most recent call last):
  File "/home/ann/train.py", line 8, in <module>
    main()
  File "/home/ann/train.py", line 6, in main
    step(b)
  File "/home/ann/train.py", line 2, in step
    raise ValueError("bad batch")
ValueError: bad batch
"""

MARKED = """\
Traceback (most recent call last):
  File "/home/ann/marks.py", line 3, in <module>
    step({"a": 1, "b": {"c": 1}})
  File "/home/ann/marks.py", line 2, in step
    return batch["a"] + batch["b"]["c"] / 0
                        ~~~~~~~~~~~~~~~~^~~
ZeroDivisionError: division by zero
"""

# Python 3.13 shows a call over several lines, blank ones included.
SPREAD = """\
Traceback (most recent call last):
  File "/home/ann/ml.py", line 3, in <module>
    f(
    ~^
        1,
        ^^
    \n    \n        2,
        ^^
    )
    ^
  File "/home/ann/ml.py", line 2, in f
    raise ValueError("x")
ValueError: x
"""

CHAINED = """\
Traceback (most recent call last):
  File "/home/ann/chain.py", line 3, in load
    open(p)
FileNotFoundError: [Errno 2] No such file or directory: '/none'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/ann/chain.py", line 7, in <module>
    load("/none")
  File "/home/ann/chain.py", line 5, in load
    raise RuntimeError("no checkpoint") from e
RuntimeError: no checkpoint

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/ann/chain.py", line 9, in <module>
    {}["k"]
    ~~^^^^^
KeyError: 'k'
"""

GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/ann/group.py", line 9, in <module>
  |     main()
  |   File "/home/ann/group.py", line 8, in main
  |     raise ExceptionGroup("both", es)
  | ExceptionGroup: both (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/home/ann/group.py", line 6, in main
    |     try: f()
    |          ^^^
    |   File "/home/ann/group.py", line 1, in a
    |     def a(): raise ValueError("one")
    |              ^^^^^^^^^^^^^^^^^^^^^^^
    | ValueError: one
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/home/ann/group.py", line 2, in b
    |     def b(): raise TypeError("two")
    |              ^^^^^^^^^^^^^^^^^^^^^^
    | TypeError: two
    +------------------------------------
"""

SYNTAX = """\
  File "/home/ann/syn.py", line 1
    def f(:
          ^
SyntaxError: invalid syntax
"""

LIBRARY = """\
Traceback (most recent call last):
  File "/home/ann/inlib.py", line 4, in <module>
    load("{x")
  File "/home/ann/inlib.py", line 3, in load
    return json.loads(t)
           ^^^^^^^^^^^^^
  File "/usr/lib/python3.11/json/decoder.py", line 353, in raw_decode
    obj, end = self.scan_once(s, idx)
               ^^^^^^^^^^^^^^^^^^^^^^
json.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)
"""

# PyTorch 2.13, an exception after init_process_group.
RANKED = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/ann/ddp.py", line 4, in step
[rank0]:     return m(x)
[rank0]:            ^^^^
[rank0]:   File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134, in forward
[rank0]:     return F.linear(input, self.weight, self.bias)
[rank0]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank0]: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x4)

[rank0]: The above exception was the direct cause of the following exception:

[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/ann/ddp.py", line 9, in <module>
[rank0]:     raise ValueError("bad batch") from e
[rank0]: ValueError: bad batch
"""

STATE_DICT = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/ann/sd.py", line 3, in <module>
[rank0]:     model.load_state_dict(state)
[rank0]:   File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 2638, in load_state_dict
[rank0]:     raise RuntimeError(
[rank0]: RuntimeError: Error(s) in loading state_dict for Linear:
[rank0]: \tsize mismatch for weight: [5, 4] from checkpoint, [4, 3] in the model.
[rank0]: \tsize mismatch for bias: [5] from checkpoint, [4] in the model.
[rank0]:[W1121 07:57:19.932000 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called
"""

LOADER = """\
Traceback (most recent call last):
  File "/home/ann/loader.py", line 6, in <module>
    for b in DataLoader(D(), num_workers=1): pass
  File "/opt/venv/lib/python3.11/site-packages/torch/_utils.py", line 794, in reraise
    raise exception
OSError: Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)  # type: ignore[possibly-undefined]
  File "/home/ann/loader.py", line 5, in __getitem__
    def __getitem__(self,i): raise OSError("corrupt sample")
                             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
OSError: corrupt sample
"""

SPAWNED = """\
Traceback (most recent call last):
  File "/home/ann/elastic.py", line 5, in main
    def main(): mp.spawn(w, nprocs=2)
                ^^^^^^^^^^^^^^^^^^^^^
  File "/opt/venv/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 211, in join
    raise ProcessRaisedException(msg, error_index, failed_process.pid)
torch.multiprocessing.spawn.ProcessRaisedException:\x20

-- Process 0 terminated with the following error:
Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "/home/ann/elastic.py", line 3, in w
    def w(i): raise ValueError("spawned")
              ^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: spawned

"""

POOL = '''\
multiprocessing.pool.RemoteTraceback:\x20
"""
Traceback (most recent call last):
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 125, in worker
    result = (True, func(*args, **kwds))
  File "/home/ann/mp.py", line 2, in w
    def w(i): raise KeyError("worker %d"%i)
              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
KeyError: 'worker 1'
"""

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/ann/mp.py", line 4, in <module>
    with m.Pool(2) as p: p.map(w,[1])
                         ^^^^^^^^^^^^
  File "/usr/lib/python3.11/multiprocessing/pool.py", line 774, in get
    raise self._value
KeyError: 'worker 1'
'''

THREAD = """\
Exception in thread Thread-1 (w):
Traceback (most recent call last):
  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "/home/ann/thread.py", line 2, in w
    def w(): raise ValueError("in thread")
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
ValueError: in thread
"""

IGNORED = """\
Exception ignored in: <function A.__del__ at 0x7fd2cf725bc0>
Traceback (most recent call last):
  File "/home/ann/ignored.py", line 2, in __del__
RuntimeError: late
"""

LEAKED = (
    "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to "
    "be 1 leaked shared_memory objects to clean up at shutdown\n  warnings.warn('resource_tracker: There appear "
    "to be %d '\n"
)

SEGFAULT = """\
Fatal Python error: Segmentation fault

Thread 0x00007f0bcc9616c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/ann/fault.py", line 3 in w

Current thread 0x00007f0bcd7d0b80 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/ann/fault.py", line 5 in crash
  File "/home/ann/fault.py", line 6 in <module>
"""

THROWN = """\
terminate called after throwing an instance of 'std::runtime_error'
  what():  bad shape
"""

ABORTED = """\
Fatal Python error: Aborted

Current thread 0x00007fdc28a10b80 (most recent call first):
  File "/home/ann/term.py", line 5 in <module>
"""

PANIC = """\

thread 'main' (8463) panicked at src/loader.rs:1:84:
index out of bounds: the len is 0 but the index is 1
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
"""


def read(text: str, max_lines: int = 30) -> Excerpt:
    return excerpt(text.encode(), max_lines=max_lines)


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
EXPECTED_NAME = "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
MISMATCHES = (
    "Error(s) in loading state_dict for Linear: size mismatch for weight: [5, 4] from checkpoint, [4, 3] in "
    "the model. size mismatch for bias: [5] from checkpoint, [4] in the model."
)


def a_frame(path: str) -> str:
    """A traceback up to what was raised."""
    return f'Traceback (most recent call last):\n  File "{path}", line 1, in f\n    g()\n'


TRACEBACKS = {
    "plain": (PLAIN, "ValueError: bad batch", "train.py:2 in step"),
    "markers": (MARKED, "ZeroDivisionError: division by zero", "marks.py:2 in step"),
    "call over several lines": (SPREAD, "ValueError: x", "ml.py:2 in f"),
    "chained": (CHAINED, "KeyError: 'k'", "chain.py:9 in <module>"),
    "exception group": (
        GROUP,
        "ExceptionGroup: both (2 sub-exceptions), first ValueError: one",
        "group.py:1 in a",
    ),
    "syntax error": (SYNTAX, "SyntaxError: invalid syntax", "syn.py:1"),
    "raised in a library": (LIBRARY, f"json.decoder.JSONDecodeError: {EXPECTED_NAME}", "inlib.py:3 in load"),
    "prefix of torch": (RANKED, "ValueError: bad batch", "ddp.py:9 in <module>"),
    "message of several lines": (STATE_DICT, f"RuntimeError: {MISMATCHES}", "sd.py:3 in <module>"),
    "DataLoader": (LOADER, "OSError: corrupt sample", "loader.py:5 in __getitem__"),
    "torch spawn": (SPAWNED, "ValueError: spawned", "elastic.py:3 in w"),
    "multiprocessing pool": (POOL, "KeyError: 'worker 1'", "mp.py:2 in w"),
    "thread": (THREAD, "ValueError: in thread", "thread.py:2 in w"),
    "out of memory": (a_frame("a.py") + OUT_OF_MEMORY + "\n", OUT_OF_MEMORY, "a.py:1 in f"),
    "no message": (
        a_frame("/home/ann/net/__init__.py") + "MemoryError\n",
        "MemoryError",
        "net/__init__.py:1 in f",
    ),
}


@pytest.mark.parametrize("text, exception, where", TRACEBACKS.values(), ids=TRACEBACKS)
def test_a_traceback_says_what_was_raised_and_where(text: str, exception: str, where: str) -> None:
    found = read(text, max_lines=100)
    assert found.exception == exception
    assert found.where == where


@pytest.mark.parametrize(
    "text", [PLAIN, MARKED, SPREAD, CHAINED, GROUP, SYNTAX, LIBRARY, LOADER, POOL, THREAD]
)
def test_the_whole_traceback_is_shown_and_nothing_of_the_noise_around_it(text: str) -> None:
    whole = tuple(line.rstrip() for line in text.splitlines())
    assert read(f"step 1\nstep 2\n{text}{IGNORED}{LEAKED}").lines == whole


@pytest.mark.parametrize("text", [RANKED, RANKED.replace("\n\n", "\n[rank0]: \n")])
def test_the_prefix_of_torch_is_not_shown(text: str) -> None:
    assert read(text).lines == tuple(line.removeprefix("[rank0]: ") for line in RANKED.splitlines())


@pytest.mark.parametrize("after", [IGNORED, LEAKED, THREAD, "\nsaving\n\ndone\n", IGNORED + "bye\n" * 5])
@pytest.mark.parametrize("text", [PLAIN, RANKED])
def test_what_comes_after_the_exception_does_not_hide_it(text: str, after: str) -> None:
    found = read(text + after)
    assert found.exception == "ValueError: bad batch"
    assert found.lines[-1] == "ValueError: bad batch"


def test_the_last_of_several_tracebacks_counts() -> None:
    assert read(MARKED + "retrying\n" + PLAIN).exception == "ValueError: bad batch"


def test_a_traceback_that_broke_off_does_not_run_into_the_next() -> None:
    broken_off = "".join(MARKED.splitlines(keepends=True)[:3]) + "killed\n"
    assert read(broken_off + PLAIN).lines == tuple(PLAIN.splitlines())


def test_only_the_last_64_kib_are_read() -> None:
    assert read(PLAIN + "\n" * 65_531 + "done\n") == Excerpt(None, None, ("done",))


def test_an_error_the_program_lived_on_after_is_shown_but_not_called_the_cause() -> None:
    found = read(PLAIN + "".join(f"step {step}\n" for step in range(100)))
    assert (found.exception, found.where) == (None, None)
    assert "ValueError: bad batch" in found.lines
    assert found.lines[-1] == "step 99"
    assert len(found.lines) == 30


def test_an_exception_python_ignored_is_no_cause() -> None:
    assert read("working\n" + IGNORED).exception is None


@pytest.mark.parametrize(
    "cut", range(len(PLAIN) - len("    raise ValueError('bad batch')\nValueError: bad batch\n"))
)
def test_a_traceback_whose_begin_is_lost_still_says_what_was_raised(cut: int) -> None:
    found = read(PLAIN[cut:])
    assert found.exception == "ValueError: bad batch"
    assert found.lines[-1] == "ValueError: bad batch"


def test_frames_that_were_only_printed_are_no_exception() -> None:
    stack = 'Call stack:\n  File "/home/ann/a.py", line 3, in f\n    g()\nMessage: hello\n'
    assert read(stack).exception is None


def test_other_output_amid_a_traceback_is_passed_over() -> None:
    torn = PLAIN.replace(
        '  File "/home/ann/train.py", line 2', 'epoch 3 done\n  File "/home/ann/train.py", line 2'
    )
    found = read(torn)
    assert (found.exception, found.where) == ("ValueError: bad batch", "train.py:2 in step")


@pytest.mark.parametrize("bar", ["\r 0%|    | 0/3\r 66%|#### | 2/3", "\r\x1b[32m 66%\x1b[0m|####  | 2/3 "])
def test_a_progress_bar_before_the_traceback_is_left_out(bar: str) -> None:
    found = read(bar + PLAIN)
    assert found.lines == tuple(PLAIN.splitlines())
    assert found.exception == "ValueError: bad batch"


def test_of_a_line_only_what_follows_the_last_carriage_return_is_shown() -> None:
    assert read("loading\r\n 10%|# |\r 90%|####|\r\n 10%\r 20%").lines == ("loading", " 90%|####|", " 20%")


CRASHES = {
    "faulthandler": (SEGFAULT, "Fatal Python error: Segmentation fault", "fault.py:5 in crash"),
    "C++": (THROWN, "std::runtime_error: bad shape", None),
    "C++ in Python": (THROWN + ABORTED, "std::runtime_error: bad shape", "term.py:5 in <module>"),
    "glibc in Python": (
        "free(): invalid pointer\n" + ABORTED,
        "free(): invalid pointer",
        "term.py:5 in <module>",
    ),
    "Rust": (PANIC, "panic: index out of bounds: the len is 0 but the index is 1", "src/loader.rs:1:84"),
    "older Rust": (
        "thread 'main' panicked at 'boom, twice', src/main.rs:2:5\n",
        "panic: boom, twice",
        "src/main.rs:2:5",
    ),
}


@pytest.mark.parametrize("text, exception, where", CRASHES.values(), ids=CRASHES)
def test_ends_outside_of_python_are_told_in_their_own_words(
    text: str, exception: str, where: str | None
) -> None:
    found = read("step 1\n" + text)
    assert (found.exception, found.where) == (exception, where)
    assert exception.rpartition(": ")[2] in "\n".join(found.lines)


@pytest.mark.parametrize(
    "line",
    [
        "terminate called without an active exception",
        "free(): invalid pointer",
        "*** stack smashing detected ***: terminated",
        "prog: a.c:3: main: Assertion `x > 0' failed.",
        "train.py: error: unrecognized arguments: --local_rank=0",
        "/usr/bin/python3: No module named nomod",
    ],
)
def test_a_last_line_that_explains_the_end_is_told_as_it_is(line: str) -> None:
    found = read(f"step 1\nusage: train.py [-h]\n{line}\n")
    assert (found.exception, found.where) == (line, None)
    assert found.lines[-1] == line


def test_of_a_crash_only_the_thread_that_crashed_is_shown() -> None:
    lines = read(SEGFAULT).lines
    assert lines[0] == "Fatal Python error: Segmentation fault"
    assert lines[-1] == '  File "/home/ann/fault.py", line 6 in <module>'
    assert not any("threading.py" in line for line in lines)


def test_the_traceback_of_a_thread_is_no_part_of_the_crash_before_it() -> None:
    found = read(THROWN + THREAD)
    assert found.exception == "std::runtime_error: bad shape"
    assert not any("Traceback" in line for line in found.lines)


def test_a_crash_during_teardown_is_not_taken_for_the_cause() -> None:
    assert read(PLAIN + THROWN).exception == "ValueError: bad batch"


def test_a_crash_of_running_code_is_the_cause_although_an_error_was_logged_before() -> None:
    assert read(PLAIN + SEGFAULT).exception == "Fatal Python error: Segmentation fault"
    assert read(PLAIN + "step\n" * 20 + THROWN).exception == "std::runtime_error: bad shape"


def test_a_long_traceback_keeps_its_head_and_its_end() -> None:
    frames = "".join(f'  File "/home/ann/deep.py", line {n}, in f\n    f({n})\n' for n in range(50))
    found = read(f"Traceback (most recent call last):\n{frames}ValueError: deep\n", max_lines=10)
    assert len(found.lines) == 10
    assert found.lines[0] == "Traceback (most recent call last):"
    assert found.lines[1] == "... 93 lines left out ..."
    assert found.lines[-3:] == ('  File "/home/ann/deep.py", line 49, in f', "    f(49)", "ValueError: deep")


def test_a_message_of_many_lines_does_not_push_out_the_exception() -> None:
    rows = "".join(f"\tmissing key {n}\n" for n in range(100))
    found = read(PLAIN.replace("bad batch\n", "bad keys:\n") + rows, max_lines=20)
    assert "ValueError: bad keys:" in found.lines
    assert found.lines[-1] == "... 92 lines left out ..."
    assert found.exception is not None
    assert found.exception.startswith("ValueError: bad keys: missing key 0 missing key 1")
    assert len(found.exception) <= 300


def test_without_an_error_the_last_lines_are_shown() -> None:
    found = read("".join(f"step {step}\n" for step in range(100)) + "\n\n", max_lines=3)
    assert found == Excerpt(None, None, ("step 97", "step 98", "step 99"))


@pytest.mark.parametrize("tail", [b"", b"\n\n", b"\0\0\0", b"\x1b[0m\r\n"])
def test_a_worker_that_wrote_nothing_says_nothing(tail: bytes) -> None:
    assert excerpt(tail) == Excerpt(None, None, ())


def test_a_line_without_end_is_cut() -> None:
    (line,) = read("x" * (32 << 10)).lines
    assert line == "x" * 497 + "..."


@pytest.mark.parametrize(
    "raw, shown",
    [
        (b"\x1b[31;1mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1bP1$q\x1b\\a\x1b(Bb\x1bcc", "abc"),
        (b"\x1b]52;c;never ended", ""),
        ("\x9b31mred\x85\u2028\u202eend".encode(), "red  end"),
        (b"a\0b\x08c\x7f\tx", "abc\tx"),
        (b"caf\xe9 \xff", "caf\ufffd \ufffd"),
        ("naïve 日本 ✓".encode(), "naïve 日本 ✓"),
    ],
)
def test_nothing_that_moves_a_terminal_comes_through(raw: bytes, shown: str) -> None:
    assert excerpt(b"<" + raw + b"\n").lines == (f"<{shown}",)


PIECES = st.sampled_from(
    [
        PLAIN,
        CHAINED,
        GROUP,
        RANKED,
        LOADER,
        SPAWNED,
        POOL,
        THREAD,
        IGNORED,
        SEGFAULT,
        THROWN,
        ABORTED,
        PANIC,
        SYNTAX,
    ]
)
FRAGMENTS = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=50).map(lambda text: text.encode("utf-8", "replace")),
    st.tuples(PIECES, st.integers(0, 300), st.integers(0, 900)).map(
        lambda cut: cut[0][cut[1] : cut[2]].encode()
    ),
    st.sampled_from(
        [b"\r", b"\n", b"\x1b[", b"[rank1]: ", b'  File "', b"  | ", b"+-+", b'"""\n', b"    x\n"]
    ),
    st.sampled_from(PLAIN.splitlines(keepends=True) + GROUP.splitlines(keepends=True)).map(str.encode),
)


@given(st.lists(FRAGMENTS, max_size=30).map(b"".join), st.integers(-1, 40))
def test_any_bytes_are_read_and_come_out_bounded_and_harmless(tail: bytes, max_lines: int) -> None:
    found = excerpt(tail, max_lines=max_lines)
    assert len(found.lines) <= max(max_lines, 0)
    assert len(found.exception or "") <= 300
    assert all(len(line) <= 500 for line in (*found.lines, found.where or ""))
    for line in (*found.lines, found.exception or "", found.where or ""):
        assert len(line.splitlines()) <= 1
        assert not [char for char in line if char != "\t" and unicodedata.category(char)[0] == "C"]


@given(st.text())
def test_printable_text_stays_printable(text: str) -> None:
    once = printable(text)
    assert printable(once) == once
    assert all(char.isprintable() or char == "\t" for char in once)


@pytest.mark.parametrize(
    "unit",
    [
        "Traceback (most recent call last):\n",
        '  File "a", line 1, in f\n',
        '  File "a", line 1\n',
        "  + Exception Group Traceback (most recent call last):\n  | \n",
        PLAIN + "\nDuring handling of the above exception, another exception occurred:\n\n",
        "terminate called \n",
        '  File "a", line 1x',
        ": ",
        "a.<locals>.",
        "\x1b[",
        "\x1b]",
        "\r",
        "\n",
    ],
)
@pytest.mark.timeout(10)
def test_a_hostile_text_takes_no_more_than_a_moment(unit: str) -> None:
    assert len(read(unit * (70_000 // len(unit))).lines) <= 30
