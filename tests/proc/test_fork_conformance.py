"""A worker of a fork server cannot tell that it is one, but for what `DIFFERENT` names with its reason.

Each test also runs with a warm server, which is no child of the agent.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import venv
import zipapp
from pathlib import Path
from typing import Any

import pytest
from tests.support import forks as support
from tests.support.forks import AT_EXIT, HIDDEN, Forks, Result, environment

import dsl
from dsl.forkserver.boot import words_of

pytestmark = pytest.mark.usefixtures("kind")

OBSERVED = Path(__file__).parent.parent / "workers" / "observed.py"

# What a worker may see that no Python of its own would show, and why.
DIFFERENT = {
    "gc.frozen": "the server's objects are left out of collections, so that their memory stays shared",
    "hash": "texts hash alike in all workers of a server: the interpreter chooses that when it starts",
}
FLAGS = (
    "",
    "-u",
    "-I",
    "-B -O",
    "-E -s",
    "-X utf8=1",
    "-X utf8=0",
    "-X faulthandler",
    "-W error",
    "-X dev",
    "-S",
)


def interpreter(flags: str = "") -> list[str]:
    return [sys.executable, *flags.split()]


def differences(plain: Result, forked: Result) -> dict[str, tuple[Any, Any]]:
    assert (plain.code, plain.err) == (0, "")
    assert (forked.code, forked.err) == (0, "")
    one, other = json.loads(plain.out), json.loads(forked.out)
    assert list(one) == list(other)
    return {name: (one[name], other[name]) for name in one if one[name] != other[name]}


@pytest.mark.parametrize(
    "flags, way",
    # An isolated Python finds no module beside it.
    [(flags, way) for flags in FLAGS for way in ("script", "module") if (flags, way) != ("-I", "module")],
)
def test_a_script_observes_the_same(tmp_path: Path, flags: str, way: str) -> None:
    shutil.copy(OBSERVED, tmp_path)
    program = ["observed.py"] if way == "script" else ["-m", "observed"]
    env = environment(PYTHONIOENCODING="latin-1:replace") if flags == "-B -O" else environment()
    with Forks(
        tmp_path, interpreter=interpreter(flags), program=program, preload=["textwrap", "decimal"], env=env
    ) as forks:
        more = {"RANK": "1"}
        forked = forks.run([*program, "a b", "--c"], env=more)
        plain = forks.run([*program, "a b", "--c"], env=more, is_forked=False)
        (tmp_path / "waiting.py").write_text(f"print('decimal' in {HIDDEN})")
        [waiting] = forks.run(["waiting.py"])
        assert forks.lost is None
    found = differences(plain[0], forked[0])
    assert set(found) - set(DIFFERENT) == set(), found
    assert waiting.out == "True\n"


def test_a_script_at_a_terminal_observes_the_same(tmp_path: Path) -> None:
    shutil.copy(OBSERVED, tmp_path)
    found = []
    with Forks(tmp_path, program=["observed.py"], env=environment()) as forks:
        for is_forked in (True, False):
            ours, theirs = os.openpty()
            try:
                [result] = forks.run(["observed.py", "--to", "found"], is_forked=is_forked, terminal=theirs)
            finally:
                os.close(ours)
                os.close(theirs)
            assert result.code == 0
            found.append(json.loads((tmp_path / "found").read_text()))
        assert forks.lost is None
    forked, plain = found
    assert {name for name in plain if plain[name] != forked[name]} <= set(DIFFERENT)
    # Line by line, as at any terminal.
    assert forked["sys.stdout"][4] == "True"


def test_an_interpreter_without_dsl_is_served(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    shutil.copy(OBSERVED, tmp_path)
    (tmp_path / "without.py").write_text("import dsl")
    python = [str(tmp_path / "venv" / "bin" / "python")]
    with Forks(tmp_path, interpreter=python, program=["observed.py"], env=environment()) as forks:
        forked = forks.run(["observed.py"], ["without.py"])
        plain = forks.run(["observed.py"], ["without.py"], is_forked=False)
        assert forks.lost is None
    assert set(differences(plain[0], forked[0])) <= set(DIFFERENT)
    assert plain[1] == forked[1]
    assert "No module named 'dsl'" in forked[1].err


def test_a_worker_may_import_dsl_or_another_module_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(
        "import dsl._core\nprint(dsl.Supervisor is dsl._core.Supervisor, dsl.WorkerSpec(['a']).argv)"
    )
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "dsl.py").write_text("name = 'mine'")
    (tmp_path / "own" / "use.py").write_text(
        "import dsl, sys\nprint(dsl.name, [one for one in sys.modules if 'dsl' in one])"
    )
    outputs = []
    for program in ("use.py", "own/use.py"):
        with Forks(tmp_path, program=[program], env=environment()) as forks:
            outputs += forks.run([program])
            assert forks.lost is None
    assert outputs == [Result(0, None, "True ['a']\n", ""), Result(0, None, "mine ['dsl']\n", "")]


def test_relative_and_absolute_paths_links_and_folders_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "show.py").write_text(
        "import sys\nprint(sys.argv, sys.path, __file__, __loader__.path, sys._getframe().f_code.co_filename)"
    )
    (tmp_path / "link.py").symlink_to("inner/show.py")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(
        "import sys\nprint('folder', sys.path, __file__, __package__)"
    )
    zipapp.create_archive(tmp_path / "folder", tmp_path / "app.pyz")
    programs = [
        ["inner/show.py", "1"], ["./inner/show.py"], [str(tmp_path / "inner" / "show.py")], ["inner/../inner/show.py"],
        ["link.py"], ["folder"], ["app.pyz", "x"], ["no such script.py"], ["-m", "no_such_module"], ["-m", "inner.show"],
        ["-c", "print(1)"], ["-m", "folder"],
    ]  # fmt: skip
    with Forks(tmp_path, program=["inner/show.py"], env=environment()) as forks:
        forked = forks.run(*programs)
        plain = forks.run(*programs, is_forked=False)
        assert forks.lost is None
    for program, one, other in zip(programs, plain, forked, strict=True):
        assert one == other, program


READER = """
import ctypes, os, threading, torch
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
read, _kept = os.pipe()
stream = ctypes.c_void_p(libc.fdopen(read, b"r"))
threading.Thread(target=libc.fgets, args=(ctypes.create_string_buffer(9), 9, stream), daemon=True).start()
while libc.ftrylockfile(stream) == 0:
    libc.funlockfile(stream)
libc.printf(b"of C")
"""

SET_GROUP = """
import os, threading
is_over, has_begun = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (has_begun.set(), is_over.wait()))
thread.start()
has_begun.wait()
os.setgid(os.getgid())
is_over.set()
thread.join()
print("done")
"""

LAZY = (
    "def __getattr__(name):\n    if name != 'solve':\n        raise AttributeError(name)\n"
    "    from importlib import import_module\n    globals()['solve'] = import_module('lazy.solve').solve\n"
    "    return solve\n"
)
A_THREAD = "import threading\nthread = threading.Thread(target=int)\nthread.start()\nthread.join()"
TAKEN_APART = "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8', line_buffering=True)"
WAITS = """
import sys, threading
sys.setswitchinterval(1000)
go = threading.Event()
def late():
    go.wait()
    open("late", "w").close()
threading.Thread(target=late, daemon=True).start()
go.set()
"""
COLLECTS = "import mine, gc\nprint(gc.isenabled(), gc.get_threshold())"
ALIKE: dict[str, tuple[str, dict[str, str]]] = {
    "a thread that reads a stream of C": (READER, {"torch": AT_EXIT.format("server")}),
    # The C library tells its threads by a signal, whose handler it installs with the first thread.
    "a change of the user where the server once had a thread": ("import mine" + SET_GROUP, {"mine": A_THREAD}),
    "a stream that an import has taken apart": ("import mine\nprint('used')", {"mine": TAKEN_APART}),
    # A thread of gloo that got the interpreter only after the end would abort the process.
    "a thread that waits for the interpreter": (WAITS, {}),
    "a guessed module that cannot be imported": (
        "import textwrap\nimport broken_one\n", {"site-packages/broken_one": "raise RuntimeError('broken')"},
    ),
    # As scipy and other packages have them: not before it is asked for.
    "a function with the name of a submodule": (
        "from lazy import solve\nprint(solve())",
        {"site-packages/lazy/__init__": LAZY, "site-packages/lazy/solve": "def solve(): return 'solved'"},
    ),
    **{
        text: (COLLECTS, {"mine": f"import gc\n{text}"})
        for text in (
            *("", "gc.disable()", "gc.set_threshold(0)", "gc.set_threshold(900, 9)", "gc.set_threshold(100_000_000)"),
            "first, *others = gc.get_threshold()\ngc.set_threshold(10 * first, *others)",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", ALIKE)
def test_a_program_does_the_same(tmp_path: Path, case: str) -> None:
    text, modules = ALIKE[case]
    for name, code in {"train": text, **modules}.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    env = environment(PYTHONPATH=str(tmp_path / "site-packages"))
    named = [name for name in modules if "/" not in name]
    with Forks(tmp_path, program=["train.py"], preload=named, env=env) as forks:
        assert forks.wait() is None
        forked = forks.run(["train.py"])
        assert forks.lost is None
        made = (tmp_path / "late").exists()
        assert forked == forks.run(["train.py"], is_forked=False)
    assert made == (text == WAITS)


THREAD_IN_EACH_FORK = """
import os, threading, time
def start():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
os.register_at_fork(after_in_child=start)
"""
REFUSED = {
    "no such module": ("", "mine,no_such_module_at_all", "", "cannot import no_such_module_at_all: ModuleNotFoundError"),
    "goes on behind its program": ("", "", "1", "PYTHONINSPECT"),
    "descriptor": (
        "import os\nos.register_at_fork(after_in_child=lambda: globals().update(f=open('log', 'w')))",
        "mine", "", "a file",
    ),
    "thread": (THREAD_IN_EACH_FORK, "mine", "", "starts a thread in each fork"),
    "folder": ("import multiprocessing.util as util\nfolder = util.get_temp_dir()", "mine", "", "multiprocessing"),
    "finalizer": (
        "import multiprocessing.util as util\nutil.Finalize(None, print, exitpriority=1)", "mine", "", "multiprocessing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_would_show_is_refused(tmp_path: Path, case: str) -> None:
    text, preload, inspects, reason = REFUSED[case]
    (tmp_path / "mine.py").write_text(text)
    with Forks(
        tmp_path, preload=preload.split(",") if preload else [], env=environment(PYTHONINSPECT=inspects)
    ) as forks:
        assert reason in str(forks.wait())


def test_the_text_that_a_worker_finds_is_what_it_runs(tmp_path: Path) -> None:
    """Whether or not the server has compiled another one before, and with all that the compiler says of it."""
    script = tmp_path / "main.py"
    texts = ["print('first')", "print('second')", "print(1 is 1)", "x = (", "import sys; sys.exit(__file__)"]
    for before in texts:
        script.write_text(before)
        with Forks(tmp_path, program=["main.py"], preload=["textwrap"], env=environment()) as forks:
            assert forks.wait() is None
            for text in (before, *texts[:2]):
                script.write_text(text)
                assert forks.run(["main.py"]) == forks.run(["main.py"], is_forked=False), (before, text)


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_stream_is_none(tmp_path: Path, closed: int) -> None:
    """The engine never closes one, but a shell between may: what counts is what is there when Python begins."""
    names = ("stdin", "stdout", "stderr")
    (tmp_path / "show.py").write_text(
        f"import os, sys\nos.write({2 if closed == 1 else 1}, repr([sys.{names[closed]}, sys.__{names[closed]}__]).encode())"
    )
    code = (
        f"import os, sys\nos.close({closed})\nfrom dsl.forkserver.ending import reopen_streams\nreopen_streams()\n"
        f"exec(open('show.py').read()) if {closed} else os.write(1, repr([sys.stdin, sys.__stdin__]).encode())"
    )
    (tmp_path / "reopened.py").write_text(code)
    with Forks(tmp_path, program=["show.py"], env=environment()) as forks:
        [result] = forks.run(["reopened.py"], is_forked=False)
    assert "[None, None]" in result.out + result.err


def test_multiprocessing_works_by_every_start_method(tmp_path: Path) -> None:
    (tmp_path / "pools.py").write_text(
        "import multiprocessing, sys\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "class Box:\n    def __init__(self, value):\n        self.value = value\n"
        "def double(box):\n    return Box(2 * box.value)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context(sys.argv[1])\n"
        "    with context.Pool(2) as pool:\n"
        "        print([box.value for box in pool.map(double, [Box(1), Box(2)])])\n"
        "    with ProcessPoolExecutor(1, mp_context=context) as pool:\n"
        "        print(pool.submit(double, Box(3)).result().value)\n"
    )
    programs = [["pools.py", method] for method in ("fork", "spawn", "forkserver")]
    programs += [["-m", "pools", "spawn"]]
    with Forks(tmp_path, program=["pools.py"], env=environment()) as forks:
        results = forks.run(*programs)
        assert forks.lost is None
    assert results == [Result(0, None, "[2, 4]\n6\n", "")] * 4


def test_a_script_that_comes_through_a_pipe_is_read_by_the_worker(tmp_path: Path) -> None:
    """The fork server looks for imports in files only."""
    os.mkfifo(tmp_path / "pipe")
    with Forks(tmp_path, program=["pipe"], env=environment()) as forks:
        assert forks.wait() is None
        writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("print('through a pipe')",))
        writer.start()
        [result] = forks.run(["pipe"])
        writer.join()
    assert result == Result(0, None, "through a pipe\n", "")


def test_an_interpreter_that_cannot_load_the_extension_executes_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As one without a global interpreter lock, which takes no extension that others take."""
    if kind == "warm":
        monkeypatch.setattr(
            support, "ARE_WARM", False
        )  # a warm server that cannot start leaves it to another
    package = tmp_path / "lib" / "dsl"
    ours = dsl.__path__[0]
    shutil.copytree(ours, package, ignore=shutil.ignore_patterns("_core*.so"))

    def words_elsewhere(*server: Any) -> tuple[str, ...]:
        return tuple([word.replace(ours, str(package)) for word in words_of(*server)])

    monkeypatch.setattr(support, "words_of", words_elsewhere)
    (tmp_path / "train.py").write_text("print('done')")
    with Forks(tmp_path, program=["train.py"], env=environment()) as forks:
        assert forks.run(["train.py"]) == [Result(0, None, "done\n", "")]
    assert "this Python cannot load the extension of dsl" in str(forks.lost)


def test_a_file_that_the_start_of_an_interpreter_keeps_is_a_reason_to_refuse(tmp_path: Path) -> None:
    """A worker keeps no descriptor, and its own file would get the number."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(f"log = open({str(tmp_path / 'log')!r}, 'a')\n")
    (tmp_path / "train.py").write_text(
        "import sitecustomize\nown = open('own', 'w')\nsitecustomize.log.write('log')\n"
        "sitecustomize.log.flush()\nprint(repr(open('own').read()))"
    )
    env = environment(PYTHONPATH=str(tmp_path / "start"))
    with Forks(tmp_path, program=["train.py"], env=env) as forks:
        assert forks.run(["train.py"]) == [Result(0, None, "''\n", "")]
    assert f"has opened {tmp_path / 'log'}" in str(forks.lost)


@pytest.mark.parametrize("when", ["start", "import"])
def test_an_interpreter_that_writes_for_perf_is_executed(tmp_path: Path, when: str) -> None:
    """From 3.12 on: older ones do not know perf."""
    (tmp_path / "mine.py").write_text("import sys\ngetattr(sys, 'activate_stack_trampoline', repr)('perf')\n")
    words = interpreter("-X perf" if when == "start" else "")
    preload = ["textwrap" if when == "start" else "mine"]
    with Forks(tmp_path, interpreter=words, preload=preload, env=environment()) as forks:
        assert ("perf" in str(forks.wait())) is (sys.version_info >= (3, 12))


CHANCE: dict[str, tuple[str, tuple[str, ...]]] = {
    "of Python": (
        (
            "import random, tempfile, uuid; from multiprocessing import current_process as process\n"
            "print(random.random(), uuid.uuid4(), next(tempfile._get_candidate_names()), process().authkey.hex())"
        ),
        (),
    ),
    # Which names files of its cache by a generator of its own.
    "of datasets": (
        "from datasets.fingerprint import fingerprint_rng\nprint(fingerprint_rng.getrandbits(64))",
        ("datasets.fingerprint",),
    ),
    "of torch": (
        "import numpy, torch\nprint(numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())",
        ("torch", "numpy.random"),
    ),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "whose", ["of Python", "of datasets", pytest.param("of torch", marks=pytest.mark.torch)]
)
def test_chance_is_not_shared_between_workers(whose: str, tmp_path: Path) -> None:
    text, preload = CHANCE[whose]
    (tmp_path / "draw.py").write_text(text)
    if whose == "of datasets":
        (tmp_path / "datasets").mkdir()
        (tmp_path / "datasets" / "__init__.py").touch()
        (tmp_path / "datasets" / "fingerprint.py").write_text(
            "import random\nfingerprint_rng = random.Random()"
        )
    with Forks(tmp_path, program=["draw.py"], preload=preload, env=environment()) as forks:
        assert forks.wait(120) is None
        drawn = forks.run(*[["draw.py"]] * 4, timeout_s=60)
        assert forks.lost is None
    columns = list(zip(*[one.out.split() for one in drawn], strict=True))
    assert [len(set(column)) for column in columns] == [4] * len(columns)
