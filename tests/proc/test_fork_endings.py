"""A worker of a fork server ends as one of an interpreter of its own: with its code, its last words and what it has left.

Each test also runs with a warm server, which is no child of the agent.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.forks import AT_EXIT, Forks, Result, environment

pytestmark = pytest.mark.usefixtures("kind")


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
    "other root": "import os\nos.chroot('/usr')\nprint('done')",
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
