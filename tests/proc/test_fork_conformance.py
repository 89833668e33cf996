"""A worker of a fork server cannot tell that it is one, but for what `DIFFERENT` names with its reason.

Each test also runs with a warm server, which is no child of the agent.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
import zipapp
from pathlib import Path
from typing import Any

import pytest
from tests.kit.users import as_ordinary_user
from tests.support import forks as support
from tests.support.forks import HIDDEN, Forks, Result

import dsl
from dsl.forkserver.boot import words_of

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

ENDINGS = {
    "end": "print('done')",
    "exception": "def fail():\n    raise ValueError('what happened')\nfail()",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('behind it')",
    "group": "raise RuntimeError('many') from OSError(2, 'cause')",
    "exit": "raise SystemExit",
    "exit number": "import sys; sys.exit(5)",
    "exit big number": "import sys; sys.exit(300)",
    "exit negative": "import sys; sys.exit(-1)",
    "exit text": "import sys; sys.exit('good bye')",
    "exit object": "import sys; sys.exit([1, 2])",
    "exit inside": "def leave():\n    raise SystemExit(7)\ntry:\n    leave()\nfinally:\n    print('finally')",
    "interrupt": "raise KeyboardInterrupt",
    "interrupted": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)",
    "terminated": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
    "aborted": "import os\nos.abort()",
    "at once": "import os, sys\nsys.stdout.write('lost')\nos._exit(9)",
    "syntax": "x = (\n",
    "null": "x = 1\0",
    "encoding": "# coding: latin-1\nprint(ascii('\xe9'))",
    "atexit": "import atexit, sys\natexit.register(lambda: print('bye', vars(sys.modules['__main__']).get('__file__')))",
    "atexit behind": "import atexit, sys\n"
    "atexit.register(lambda: print(vars(sys.modules['__main__']).get('__file__'), sys.last_value))\n1 / 0",
    "atexit fails": "import atexit\natexit.register(lambda: 1 / 0)",
    "atexit order": "import atexit\nfor n in range(3):\n    atexit.register(print, n)",
    "hook": "import sys\nsys.excepthook = lambda *what: print('hook', what[1])\nraise ValueError('seen')",
    "hook fails": "import sys\nsys.excepthook = lambda *what: 1 / 0\nraise ValueError('seen')",
    "stack": "import inspect, traceback\nprint(len(inspect.stack()))\ntraceback.print_stack()",
    "warning": "import warnings\nwarnings.warn('mind', stacklevel=1)\nwarnings.warn('mind', stacklevel=3)",
    # It goes on when the main thread has ended, which waits for it nevertheless.
    "thread": "import threading\ndef late():\n    threading.main_thread().join()\n    print('late')\n"
    "threading.Thread(target=late).start()\nprint('main')",
    "thread fails": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='one').start()",
    "daemon": "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
    "del": "import sys\nclass Late:\n    def __del__(self):\n        print('del', sys.is_finalizing())\n"
    "def leave():\n    kept = Late()\n    sys.exit(3)\nleave()",
    "del global": "import sys\nclass Late:\n    def __del__(self, print=print):\n        print('del')\nkept = Late()",
    "file": "kept = open('written by ' + __file__.rpartition('/')[2], 'w')\nkept.write('all of it')",
    "flush": "import sys\nsys.stdout.write('out')\nsys.stderr.write('err')\n1 / 0",
    "closed": "import sys\nsys.stdout.close()",
    "full": "import os, sys\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)\nprint('nowhere')",
    "recursion": "def deeper(n):\n    return deeper(n + 1)\ndeeper(0)",
    "pickle": "import pickle\nclass Thing:\n    value = 3\nprint(pickle.loads(pickle.dumps(Thing())).value)",
    "input": "print(input() + '!')",
    "future": "print(1 if 3 / 2 == 1.5 else 2, '__future__' in dir())",
    "exit none": "import sys; sys.exit(None)",
    "exit true": "import sys; sys.exit(True)",
    "exit huge number": "import sys; sys.exit(2**70)",
    "exit unprintable": "class Bad:\n    def __str__(self): 1 / 0\nraise SystemExit(Bad())",
    "exit in a thread": "import sys, threading\nthreading.Thread(target=sys.exit, args=(5,)).start()\nprint('main')",
    "interrupt derived": "class Stop(KeyboardInterrupt): pass\nraise Stop",
    "interrupt in a thread": "import threading\ndef stop():\n    raise KeyboardInterrupt\nthreading.Thread(target=stop, name='one').start()",
    "interrupted loop": "import asyncio, os, signal\nasync def main():\n    os.kill(os.getpid(), signal.SIGINT)\n"
    "    await asyncio.sleep(20)\nasyncio.run(main())",
    "fork that ends": "import os, sys\nprint('twice')\npid = os.fork()\nif pid == 0:\n    sys.exit(3)\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "fork that runs on": "import os\npid = os.fork()\nif pid:\n    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "fork that fails": "import os\npid = os.fork()\nif pid == 0:\n    raise ValueError('inside')\nprint(os.waitpid(pid, 0)[1])",
    "executes itself": "import os, sys\nif 'again' not in sys.argv:\n    os.execv(sys.executable, [*sys.orig_argv, 'again'])\n"
    "print(sys.argv)",
    "starts itself": "import subprocess, sys\nif 'again' in sys.argv:\n    raise SystemExit(4)\n"
    "print(subprocess.run([*sys.orig_argv, 'again']).returncode)",
    "pool at the end": "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
    "ThreadPoolExecutor(1).submit(lambda: (time.sleep(0.1), print('done')))",
    "threads at the end": "import atexit, threading\nthreading._register_atexit(print, 'threads')\natexit.register(print, 'all')",
    "unraisable": "class Late:\n    def __del__(self):\n        1 / 0\nkept = Late()",
    "generator": "def steps():\n    try:\n        yield\n    finally:\n        print('closed')\nkept = steps()\nnext(kept)",
    "no stdout": "import sys\nsys.stdout = None\nprint('nowhere')",
    "breakpoint": "x = 1\nbreakpoint()\nprint('behind')",
    "source": "import inspect\ndef one():\n    return 1\nprint(inspect.getsource(one), inspect.getmodule(one).__name__)",
    "dump": "import faulthandler\ndef inner():\n    faulthandler.dump_traceback()\ninner()",
    "doctest": "'''\n>>> 1 + 1\n2\n'''\nimport doctest\nprint(doctest.testmod())",
    "daemon process": "import multiprocessing, time\n"
    "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,), daemon=True).start()",
    # As libraries look for the place of a title.
    "command in memory": "import ctypes, sys\ncount = ctypes.c_int()\nwords = ctypes.c_void_p()\n"
    "ctypes.pythonapi.Py_GetArgcArgv(ctypes.byref(count), ctypes.byref(words))\n"
    "first = ctypes.c_void_p.from_address(ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'environ').value).value\n"
    "before = ctypes.string_at(first - 8192, 8192).split(b'\\0')\nprint(before[-1 - count.value].decode() == sys.orig_argv[0])",
    "again as a module": "import importlib\nif __name__ == '__main__':\n"
    "    print(importlib.import_module(__file__.rpartition('/')[2][:-3]).__name__)",
    "faults": "import faulthandler, os\nfaulthandler.enable()\nos.kill(os.getpid(), 11)",
}


@pytest.fixture(autouse=True, params=["forkserver", "warm"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the fork servers of a test stay after their job."""
    monkeypatch.setattr(support, "ARE_WARM", request.param == "warm")
    return str(request.param)


def environment(**more: str) -> dict[str, str]:
    """A small one, in which `PYTHONHASHSEED` and the like are not set."""
    kept = ("PATH", "HOME", "LD_LIBRARY_PATH", "DSL_TEST_TOKEN", "DSL_ENGINE_DISABLE")
    return {**{name: os.environ[name] for name in kept if name in os.environ}, "OBSERVED": "yes", **more}


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


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "way, preload", [("script", "textwrap"), ("module", "textwrap"), ("script", "torch")]
)
def test_every_way_to_end_is_the_same(tmp_path: Path, way: str, preload: str) -> None:
    """With torch the process ends when all that the worker made has ended, and skips the rest."""
    (tmp_path / "torch.py").write_text("")
    for name, text in ENDINGS.items():
        (tmp_path / f"case_{name.replace(' ', '_')}.py").write_text(text, encoding="latin-1")
    names = [f"case_{name.replace(' ', '_')}" for name in ENDINGS]
    programs = [[f"{name}.py"] if way == "script" else ["-m", name] for name in names]
    with Forks(tmp_path, program=["case_end.py"], preload=[preload], env=environment()) as forks:
        # All at once would be more than a small machine ends in the time of one run.
        slices = [programs[start : start + 16] for start in range(0, len(programs), 16)]
        forked = [result for some in slices for result in forks.run(*some)]
        files = {path: path.read_text() for path in tmp_path.glob("written by*")}
        plain = [result for some in slices for result in forks.run(*some, is_forked=False)]
        assert forks.lost is None
    assert list(files.values()) == ["all of it"]
    wrong = {
        name: (one, other)
        for name, one, other in zip(names, plain, forked, strict=True)
        if _comparable(one) != _comparable(other)
    }
    assert wrong == {}


def _comparable(result: Result) -> Result:
    """Without addresses, and how often the deepest call is repeated: our frames count in the depth."""
    text = re.sub(r"0x[0-9a-f]+", "ADDRESS", result.err)
    return result._replace(err=re.sub(r"repeated \d+ more times", "repeated", text))


HOLDER = "import sys\nkept = {}\nclass Late:\n    def __del__(self):\n        print('late', self.name)\nown = Late()\nown.name = 'own'"
HELD = {
    "attribute": "holder.thing = holder.Late()\nholder.thing.name = 'attribute'",
    "container": "holder.kept['thing'] = thing = holder.Late()\nthing.name = 'container'\ndel thing",
    "file": "holder.kept['file'] = open('held file', 'w')\nholder.kept['file'].write('all of it')\n"
    "import atexit\natexit.register(lambda: print(open('held file').read()))",
    "generator": "def steps():\n    try:\n        yield\n    finally:\n        print('closed')\nholder.kept[0] = steps()\nnext(holder.kept[0])",
    "fails": "class Bad:\n    def __del__(self):\n        1 / 0\nholder.kept[0] = Bad()",
    "after its own": "class Own:\n    def __del__(self):\n        holder.kept[0].write('at the end')\nown = Own()\n"
    "holder.kept[0] = open('late file', 'w')",
    "stream": "import io\nholder.kept[0] = io.TextIOWrapper(sys.stdout.buffer)\nprint('before', flush=True)\n"
    "class Own:\n    def __del__(self, print=print):\n        print('after')\nown = Own()",
    "replaced module": "import types\nholder = sys.modules['holder'] = types.ModuleType('holder')\nprint('replaced')",
}


@pytest.mark.parametrize("preload", ["holder", "holder,torch"])
def test_what_preloaded_modules_hold_for_a_worker_ends_with_it(tmp_path: Path, preload: str) -> None:
    """Their own objects do not end: the server made them."""
    (tmp_path / "holder.py").write_text(HOLDER)
    (tmp_path / "torch.py").write_text("")
    for name, text in HELD.items():
        (tmp_path / f"{name} held.py").write_text(f"import holder, sys\n{text}")
    programs = [[f"{name} held.py"] for name in HELD]
    with Forks(tmp_path, program=["file held.py"], preload=preload.split(","), env=environment()) as forks:
        forked = dict(zip(HELD, forks.run(*programs), strict=True))
        assert forks.lost is None
        files = {path.name: path.read_text() for path in tmp_path.glob("* file")}
        [plain] = forks.run(["fails held.py"], is_forked=False)
    assert {name: one.out for name, one in forked.items()} == {
        "attribute": "late attribute\n",
        "container": "late container\n",
        "file": "\n",
        "generator": "closed\n",
        "fails": "",
        "after its own": "",
        "stream": "before\nafter\n",
        "replaced module": "replaced\n",
    }
    assert files == {"held file": "all of it", "late file": "at the end"}
    assert {one.code for one in forked.values()} == {0}
    errors = [one.err.splitlines()[-1:] for one in (forked["fails"], plain)]
    assert errors == [["ZeroDivisionError: division by zero"]] * 2


# `puts` is called by C, when there is no Python any more.
AT_EXIT = """
import ctypes
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"{}")), None)
"""
LEAVES = {
    "end": "",
    "exit": "raise SystemExit(300)",
    "error": "1 / 0",
    "buffers": "libc.printf(b'of C')\nprint('of Python')",
    "stream": "import os\nlibc.fdopen.restype = ctypes.c_void_p\n"
    "libc.fputs(b'of a stream', ctypes.c_void_p(libc.fdopen(os.dup(1), b'w')))",
    "functions": "import atexit\natexit.register(print, 'atexit')",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "child": "import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait()",
}


@pytest.mark.parametrize(
    "preload, variable", [("torch", ""), ("torch", "CPUPROFILE"), ("torch h5py", ""), ("other", "")]
)
def test_an_end_leaves_out_what_the_server_has_registered_beside_torch_alone(
    tmp_path: Path, preload: str, variable: str
) -> None:
    """What was registered in the worker is called, and what its streams hold is written."""
    modules = preload.split()
    for module in modules:
        (tmp_path / f"{module}.py").write_text(AT_EXIT.format("server"))
    for name, text in LEAVES.items():
        imports = f"import {', '.join(modules)}\n"
        (tmp_path / f"{name}_.py").write_text(imports + AT_EXIT.format("worker") + text)
    programs = [[f"{name}_.py"] for name in LEAVES]
    env = environment(**({variable: "file"} if variable else {}))
    with Forks(tmp_path, program=["end_.py"], preload=modules, env=env) as forks:
        assert forks.wait() is None
        forked = forks.run(*programs)
        plain = forks.run(*programs, is_forked=False)
    assert all("worker" in one.out and "server" in one.out for one in plain)
    if preload == "torch" and not variable:
        plain = [one._replace(out=one.out.replace("server\n", "")) for one in plain]
    assert dict(zip(LEAVES, forked, strict=True)) == dict(zip(LEAVES, plain, strict=True))


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


def test_a_thread_that_reads_a_stream_of_c_does_not_hold_up_an_end(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(AT_EXIT.format("server"))
    (tmp_path / "read.py").write_text(READER)
    with Forks(tmp_path, program=["read.py"], preload=["torch"], env=environment()) as forks:
        assert forks.wait() is None
        assert forks.run(["read.py"]) == forks.run(["read.py"], is_forked=False)


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


def test_a_worker_whose_server_once_had_a_thread_may_change_its_user(tmp_path: Path) -> None:
    """The C library tells its threads by a signal, whose handler it installs with the first thread."""
    (tmp_path / "threaded.py").write_text(
        "import threading\nthread = threading.Thread(target=int)\nthread.start()\nthread.join()"
    )
    (tmp_path / "change.py").write_text("import threaded" + SET_GROUP)
    with Forks(tmp_path, program=["change.py"], preload=["threaded"], env=environment()) as forks:
        assert forks.wait() is None
        assert forks.run(["change.py"]) == [Result(0, None, "done\n", "")]


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
        f"import os, sys\nos.close({closed})\nfrom dsl.forkserver import streams\nstreams.reopen()\n"
        f"exec(open('show.py').read()) if {closed} else os.write(1, repr([sys.stdin, sys.__stdin__]).encode())"
    )
    (tmp_path / "reopened.py").write_text(code)
    with Forks(tmp_path, program=["show.py"], env=environment()) as forks:
        [result] = forks.run(["reopened.py"], is_forked=False)
    assert "[None, None]" in result.out + result.err


def test_chance_is_not_shared_between_workers(tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(
        "import multiprocessing, random, tempfile, uuid\n"
        "print(random.random(), uuid.uuid4(), next(tempfile._get_candidate_names()),"
        " multiprocessing.current_process().authkey.hex())"
    )
    with Forks(tmp_path, program=["draw.py"], env=environment()) as forks:
        drawn = forks.run(*[["draw.py"]] * 4)
        assert forks.lost is None
    columns = list(zip(*[one.out.split() for one in drawn], strict=True))
    assert [len(set(column)) for column in columns] == [4, 4, 4, 4]


def test_the_chance_that_names_files_is_not_shared(tmp_path: Path) -> None:
    """As `datasets` names those of its cache, from a generator of its own."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").write_text("")
    (tmp_path / "datasets" / "fingerprint.py").write_text("import random\nfingerprint_rng = random.Random()")
    (tmp_path / "draw.py").write_text(
        "from datasets.fingerprint import fingerprint_rng\nprint(fingerprint_rng.getrandbits(64))"
    )
    with Forks(tmp_path, preload=["datasets.fingerprint"], env=environment()) as forks:
        drawn = forks.run(*[["draw.py"]] * 3)
        assert forks.lost is None
    assert len({one.out for one in drawn}) == 3


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


IMPORTED = """
import atexit, ctypes, faulthandler, locale, logging, multiprocessing, os, resource, signal, sys, threading, warnings
import __main__
library = ctypes.CDLL(None)
library.setenv(b"SET_BY_C", b"c", 1)
library.setenv(b"OBSERVED", b"c", 1)
library.unsetenv(b"GONE_IN_C")
os.environ.setdefault("NEW", "set")
os.environ.setdefault("RANK", "none")
os.environ["CHANGED"] += "!"
del os.environ["GONE"]
locale.setlocale(locale.LC_ALL, "C")
signal.signal(signal.SIGUSR1, lambda *_: print("usr1"))
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.siginterrupt(signal.SIGUSR1, False)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
faulthandler.register(signal.SIGTTIN, chain=True)
warnings.filterwarnings("error", category=DeprecationWarning)
os.umask(0o077)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (77, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.path.insert(0, "/first")
sys.path.append("/last")
sys.setrecursionlimit(1234)
sys.excepthook = lambda *what: print("hook", what[1])
sys.stdout.reconfigure(line_buffering=True, errors="replace")
multiprocessing.set_start_method("spawn")
logging.basicConfig(stream=sys.stdout, format="%(message)s!")
threading.stack_size(1 << 20)
atexit.register(print, "at the end")
__main__.left = "here"
os.chdir("inner")
"""

AFTER_IMPORTS = """
import imported
import ctypes, locale, logging, multiprocessing, os, resource, signal, sys, threading, warnings
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
names = ("SET_BY_C", "OBSERVED", "GONE_IN_C", "NEW", "RANK", "CHANGED", "GONE")
print([(os.environ.get(name), getenv(name.encode())) for name in names], flush=True)
os.system("env | grep -E 'SET_BY_C|OBSERVED|GONE|NEW|RANK|CHANGED' | sort")
print(locale.setlocale(locale.LC_ALL), warnings.filters[0], oct(os.umask(0)), sys.path, left)
print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE), os.getcwd())
with open("/proc/self/status") as file:
    print([line for line in file if line.startswith("Sig")][2:])
print({int(one): type(signal.getsignal(one)).__name__ for one in signal.valid_signals()})
print(sys.stdout.line_buffering, sys.stdout.errors, multiprocessing.get_start_method(), threading.stack_size())
logging.error("logged")
os.kill(os.getpid(), signal.SIGUSR1)
1 / 0
"""


def test_what_imports_do_to_the_process_is_done_to_the_worker(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "imported.py").write_text(IMPORTED)
    (tmp_path / "use.py").write_text(AFTER_IMPORTS)
    env = environment(GONE="yes", GONE_IN_C="yes", CHANGED="yes")
    with Forks(tmp_path, program=["use.py"], preload=["imported"], env=env) as forks:
        forked = forks.run(["use.py"], ["use.py"], env={"RANK": "1"})
        plain = forks.run(["use.py"], is_forked=False, env={"RANK": "1"})
        assert forks.lost is None
    assert forked == plain * 2
    assert (
        "[(None, b'c'), ('yes', b'c'), ('yes', None), ('set', b'set'), ('1', b'1'), ('yes!', b'yes!')"
        in plain[0].out
    )
    assert plain[0].out.endswith("logged!\nusr1\nhook division by zero\nat the end\n")


def test_what_an_import_has_c_print_is_in_no_output_of_a_worker(tmp_path: Path) -> None:
    """C keeps it until its buffer is full, and a forked process has a copy of that."""
    (tmp_path / "prints.py").write_text("import ctypes\nctypes.CDLL(None).printf(b'imported')\n")
    (tmp_path / "use.py").write_text("import prints\nprint('used')")
    with Forks(tmp_path, program=["use.py"], preload=["prints"], env=environment()) as forks:
        results = forks.run(["use.py"], ["use.py"])
        assert forks.lost is None
    assert results == [Result(0, None, "used\n", "")] * 2


LOWERED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (77, 512))
"""


def test_a_limit_that_an_import_has_lowered_for_good_is_the_workers(tmp_path: Path) -> None:
    """Only root could raise it again. For others no worker started."""
    (tmp_path / "lowered.py").write_text(LOWERED)
    (tmp_path / "use.py").write_text(
        "import lowered, resource, sys\n"
        f"print(*resource.getrlimit(resource.RLIMIT_NOFILE), 'decimal' in {HIDDEN}, flush=True)\n"
    )
    words = [
        "--num_gpus",
        "2",
        "--no_local_rank",
        "--start-method",
        "forkserver",
        "--preload",
        "lowered,decimal",
    ]
    tmp_path.chmod(0o755)
    command = as_ordinary_user([*words, "use.py"], tmp_path)
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["77 512 True"] * 2), result.stderr


def test_where_the_working_directory_may_not_be_searched_workers_are_executed(tmp_path: Path) -> None:
    """Whoever is executed is there already; who is forked would have to go there."""
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    (tmp_path / "use.py").write_text(f"import os\nprint(os.getcwd(), 'decimal' in {HIDDEN})")
    words = ["--num_gpus", "2", "--no_local_rank", "--start-method", "forkserver", "--preload", "decimal"]
    tmp_path.chmod(0o755)
    command = as_ordinary_user([*words, str(tmp_path / "use.py")], tmp_path)
    result = subprocess.run(command, cwd=closed, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, f"{closed} False\n" * 2), result.stderr
    assert "fork server 0 cannot be told the working directory: Permission denied" in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "gc.disable()",
        "gc.set_threshold(0)",
        "gc.set_threshold(900, 9)",
        "gc.set_threshold(100_000_000)",
        "first, *others = gc.get_threshold()\ngc.set_threshold(10 * first, *others)",
        "",
    ],
)
def test_what_imports_ask_of_the_garbage_collector_holds_for_the_worker(tmp_path: Path, text: str) -> None:
    (tmp_path / "imported.py").write_text(f"import gc\n{text}\n")
    (tmp_path / "use.py").write_text("import imported, gc\nprint(gc.isenabled(), gc.get_threshold())")
    with Forks(tmp_path, program=["use.py"], preload=["imported"], env=environment()) as forks:
        assert forks.wait() is None
        assert forks.run(["use.py"]) == forks.run(["use.py"], is_forked=False)


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


def test_a_guessed_module_that_cannot_be_imported_is_told_by_the_worker(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "broken_one.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "use.py").write_text("import textwrap\nimport broken_one\n")
    env = environment(PYTHONPATH=str(tmp_path / "site-packages"))
    with Forks(tmp_path, program=["use.py"], env=env) as forks:
        forked = forks.run(["use.py"])
        plain = forks.run(["use.py"], is_forked=False)
        assert forks.lost is None
    assert forked == plain
    assert "RuntimeError: broken" in forked[0].err


def test_a_package_that_is_half_imported_is_not_imported_a_second_time(tmp_path: Path) -> None:
    """As torch, which refuses that with other words than those of what has failed."""
    (tmp_path / "site-packages" / "half").mkdir(parents=True)
    (tmp_path / "site-packages" / "half" / "part.py").write_text("")
    (tmp_path / "site-packages" / "half" / "__init__.py").write_text(
        "import sys\nfrom . import part\nassert not hasattr(sys, 'half'), 'again'\n"
        "sys.half = True\nraise OSError('no library')"
    )
    (tmp_path / "use.py").write_text("import half\n")
    env = environment(PYTHONPATH=str(tmp_path / "site-packages"))
    with Forks(tmp_path, program=["use.py"], env=env) as forks:
        [result] = forks.run(["use.py"])
    assert "OSError: no library" in result.err
    assert str(forks.lost) == "refused: cannot import half: OSError: no library"


def test_a_named_module_that_cannot_be_imported_is_a_reason_to_refuse(tmp_path: Path) -> None:
    with Forks(tmp_path, preload=["textwrap", "no_such_module_at_all"], env=environment()) as forks:
        lost = forks.wait()
    assert lost is not None
    assert "cannot import no_such_module_at_all: ModuleNotFoundError" in lost


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


def test_an_interpreter_that_goes_on_behind_its_program_is_executed(tmp_path: Path) -> None:
    with Forks(tmp_path, env=environment(PYTHONINSPECT="1")) as forks:
        assert "PYTHONINSPECT" in str(forks.wait())


THREAD_IN_EACH_FORK = """
import os, threading, time
def start():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
os.register_at_fork(after_in_child=start)
"""


@pytest.mark.parametrize(
    "text, reason",
    [
        (
            "import os\nos.register_at_fork(after_in_child=lambda: globals().update(f=open('log', 'w')))",
            "a file",
        ),
        (THREAD_IN_EACH_FORK, "starts a thread in each fork"),
        ("import multiprocessing.util as util\nfolder = util.get_temp_dir()", "multiprocessing"),
        (
            "import multiprocessing.util as util\nutil.Finalize(None, print, exitpriority=1)",
            "multiprocessing",
        ),
    ],
    ids=["descriptor", "thread", "folder", "finalizer"],
)
def test_what_would_be_in_each_fork_is_a_reason_to_refuse(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "train.py").write_text("import mine\n")
    with Forks(tmp_path, program=["train.py"], preload=["mine"], env=environment()) as forks:
        assert reason in str(forks.wait())


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


def test_a_guessed_module_that_asks_for_its_place_is_imported_by_each_worker(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "by_rank.py").write_text("import os\nrank = os.environ.get('RANK', '0')\n")
    (tmp_path / "site-packages" / "outer.py").write_text("import by_rank\n")
    (tmp_path / "train.py").write_text("import outer, by_rank\nprint(by_rank.rank)\n")
    env = environment(PYTHONPATH=str(tmp_path / "site-packages"))
    with Forks(tmp_path, program=["train.py"], env=env) as forks:
        assert forks.run(["train.py"], env={"RANK": "1"}) == [Result(0, None, "1\n", "")]
    said = "outer reads RANK when it is imported: name what to import with --preload"
    assert forks.lost == f"refused: {said}"


def test_what_a_script_does_before_an_import_counts_for_it(tmp_path: Path) -> None:
    for folder in ("site-packages", "src"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "settled.py").write_text(
            f"import os\nfound = {folder!r}, os.environ.get('SETTING')\n"
        )
    (tmp_path / "train.py").write_text(
        "import os, sys, textwrap\nsys.path.insert(0, os.path.join(os.getcwd(), sys.argv[1]))\n"
        "os.environ['SETTING'] = 'set'\nimport settled\nprint(settled.found)\n"
    )
    env = environment(PYTHONPATH=str(tmp_path / "site-packages"))
    with Forks(tmp_path, program=["train.py"], env=env) as forks:
        forked = forks.run(["train.py", "src"], ["train.py", "site-packages"])
        assert forks.lost is None
    assert [one.out for one in forked] == ["('src', 'set')\n", "('site-packages', 'set')\n"]


def test_a_function_with_the_name_of_a_submodule_is_what_a_worker_gets(tmp_path: Path) -> None:
    """As scipy and other packages give theirs: not before it is asked for."""
    package = tmp_path / "site-packages" / "lazy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "def __getattr__(name):\n    if name != 'solve':\n        raise AttributeError(name)\n"
        "    from importlib import import_module\n    globals()['solve'] = import_module('lazy.solve').solve\n"
        "    return solve\n"
    )
    (package / "solve.py").write_text("def solve():\n    return 'solved'\n")
    (tmp_path / "train.py").write_text("from lazy import solve\nprint(solve())\n")
    env = environment(PYTHONPATH=str(tmp_path / "site-packages"))
    with Forks(tmp_path, program=["train.py"], env=env) as forks:
        assert forks.run(["train.py"]) == [Result(0, None, "solved\n", "")]
        assert forks.lost is None


def test_a_folder_that_is_made_between_two_attempts_is_searched(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import textwrap\nimport late_one\n")
    env = environment(PYTHONPATH=str(tmp_path / "late"))
    with Forks(tmp_path, program=["train.py"], env=env) as forks:
        [first] = forks.run(["train.py"])
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "late_one.py").write_text("print('found')")
        assert forks.run(["train.py"]) == [Result(0, None, "found\n", "")]
        assert forks.lost is None
    assert "No module named 'late_one'" in first.err


def test_a_stream_that_an_import_has_taken_apart_is_left_to_its_new_owner(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding='utf-8', line_buffering=True)\n"
    )
    (tmp_path / "train.py").write_text("import mine\nprint('used')\n")
    with Forks(tmp_path, program=["train.py"], preload=["mine"], env=environment()) as forks:
        assert forks.run(["train.py"]) == forks.run(["train.py"], is_forked=False)
        assert forks.lost is None


def test_modules_beside_the_script_are_imported_by_each_worker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import textwrap\nprint('imported by', __import__('os').environ['RANK'])\n"
    )
    (tmp_path / "train.py").write_text(f"waiting = 'textwrap' in {HIDDEN}\nimport mine\nprint(waiting)\n")
    with Forks(tmp_path, program=["train.py"], env=environment()) as forks:
        [first] = forks.run(["train.py"], env={"RANK": "0"})
        (tmp_path / "mine.py").write_text("print('changed')\n")
        [second] = forks.run(["train.py"], env={"RANK": "1"})
        assert forks.lost is None
    assert first.out == "imported by 0\nTrue\n"
    assert second.out == "changed\nTrue\n"


@pytest.mark.torch
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "text, reason",
    [
        ("import torch\nkept = torch.ones(900, 900) @ torch.ones(900, 900)", "thread"),
        ("import torch\ntorch.cuda.is_available()", "cuda"),
        ("import numpy, torch\nkept = numpy.ones((900, 900)) @ numpy.ones((900, 900))", None),
        ("import torch, torch._dynamo", None),
    ],
    ids=["openmp", "devices", "openblas", "imports"],
)
def test_what_torch_has_done_decides(tmp_path: Path, text: str, reason: str | None) -> None:
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "train.py").write_text(
        "import numpy, torch\n"
        "print((numpy.ones((900, 900)) @ numpy.ones((900, 900))).sum(), (torch.ones(900, 900) @ torch.ones(900, 900)).sum())"
    )
    with Forks(
        tmp_path, program=["train.py"], preload=["mine"], env=dict(os.environ, OMP_NUM_THREADS="2")
    ) as forks:
        lost = forks.wait(120)
        if reason is None:
            results = forks.run(*[["train.py"]] * 2, timeout_s=100)
            assert [one.code for one in results] == [0, 0]
            assert len({one.out for one in results}) == 1
            assert forks.lost is None
        else:
            assert lost is not None
            assert reason in lost


def test_a_thread_that_waits_for_the_interpreter_gets_it_before_the_end(tmp_path: Path) -> None:
    """A thread of gloo that got it only later would abort the process."""
    (tmp_path / "train.py").write_text(
        "import sys, threading\nsys.setswitchinterval(1000)\ngo = threading.Event()\n"
        "def late():\n    go.wait()\n    open('late', 'w').close()\n"
        "threading.Thread(target=late, daemon=True).start()\ngo.set()"
    )
    with Forks(tmp_path, program=["train.py"], env=environment()) as forks:
        assert forks.run(["train.py"]) == [Result(0, None, "", "")]
        assert forks.lost is None
    assert (tmp_path / "late").exists()


TRAINING = f"""
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main():
    is_hidden = "torch._dynamo" in {HIDDEN}
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.full((8, 4), 1.0 + dist.get_rank())).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("loss", loss.item())
    (torch.ones(900, 900) @ torch.ones(900, 900)).sum()
    for context in sys.argv[1:]:
        loader = DataLoader(TensorDataset(torch.ones(6, 2)), num_workers=2, multiprocessing_context=context)
        print(context, sum(batch.sum().item() for (batch,) in loader))
    dist.destroy_process_group()
    with open("modules", "w") as file:
        json.dump([is_hidden, sorted(sys.modules)], file)


if __name__ == "__main__":
    main()
"""


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_training_step_and_its_loaders_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    common = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with Forks(tmp_path, program=["train.py"], env=dict(os.environ)) as forks:
        assert forks.wait(120) is None
        forked = forks.run(["train.py", "fork", "spawn"], env=common, timeout_s=120)
        # What a step imports by itself was imported by the server, and shows itself when the step imports it.
        is_hidden, seen = json.loads((tmp_path / "modules").read_text())
        plain = forks.run(["train.py", "fork", "spawn"], env=common, is_forked=False, timeout_s=120)
        assert forks.lost is None
    assert is_hidden
    assert json.loads((tmp_path / "modules").read_text()) == [False, seen]
    assert (forked[0].code, forked[0].err) == (0, "")
    assert forked[0].out.splitlines()[0] == plain[0].out.splitlines()[0]
    assert forked[0].out.splitlines()[1:] == ["fork 12.0", "spawn 12.0"]


@pytest.mark.torch
@pytest.mark.timeout(200)
def test_the_chance_of_torch_and_numpy_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "draw.py").write_text(
        "import numpy, torch\nprint(numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())"
    )
    with Forks(
        tmp_path, program=["draw.py"], preload=["torch", "numpy.random"], env=dict(os.environ)
    ) as forks:
        assert forks.wait(120) is None
        drawn = forks.run(*[["draw.py"]] * 3, timeout_s=60)
    columns = list(zip(*[one.out.split() for one in drawn], strict=True))
    assert [len(set(column)) for column in columns] == [3, 3, 3]


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_torch_compile_works(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nprint(torch.compile(lambda x: x.sin() + x.cos())(torch.zeros(3)).tolist())"
    )
    cache = str(tmp_path / "cache")
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache)
    with Forks(tmp_path, program=["train.py"], env=env) as forks:
        assert forks.wait(120) is None
        [result] = forks.run(["train.py"], timeout_s=200)
    assert (result.code, result.out) == (0, "[1.0, 1.0, 1.0]\n"), result.err
