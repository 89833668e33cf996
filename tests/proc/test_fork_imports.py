"""A forked worker has imported what an executed one has at the same line, and its modules say the same."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.forks import HIDDEN, Forks, Result, environment

from dsl.forkserver.preload import IMPORTED_LATER

pytestmark = pytest.mark.usefixtures("kind")

# Beside each script. Settings are looked at only where the script has imported them.
LOOK = f"""
import json, os, sys

SETTINGS = ("torch._inductor.config", "torch._dynamo.config", "torch._functorch.config", "torch.compiler.config")
# Of the tests; a warm server's folder for temporary files is another one.
OTHERS = {{"DSL_JOB_ID", "TMPDIR", "XDG_RUNTIME_DIR", *[name for name in os.environ if "_TEST" in name]}}
temporary = os.environ.get("TMPDIR", "/tmp")
seen = []
waiting = "torch" in {HIDDEN}


def look():
    settings = {{}}
    for name in SETTINGS:
        module = sys.modules.get(name)
        warnings = sys.modules.get("warnings")
        for key in vars(module)["_config"] if module is not None else ():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some settings are deprecated
                try:
                    value = getattr(module, key)
                except Exception as error:
                    value = repr(error)
            if isinstance(value, (bool, int, float, str)):
                settings[f"{{name}}.{{key}}"] = value
    functional = sys.modules.get("torch.distributed.nn.functional")
    torch = sys.modules.get("torch")
    seen.append({{
        "modules": sorted(sys.modules),
        "variables": {{name: value.replace(temporary, "") for name, value in os.environ.items() if name not in OTHERS}},
        "settings": settings,
        "default group": functional is not None and functional.broadcast.__defaults__[-1] is not None,
        "functions": [getattr(torch, name, None).__qualname__ for name in ("manual_seed", "compile") if torch],
    }})
    with open("seen." + sys.argv[0], "w") as file:
        json.dump([waiting, seen], file)
"""
STEP = """
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""
INDUCTOR = (
    'os.environ["TORCHINDUCTOR_MAX_AUTOTUNE"] = "1"\nos.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "7"\n'
)
SCRIPTS = {
    "only torch": "look()\nimport torch\nlook()\ntorch.manual_seed(3)\nlook()",
    "a step": f"look()\nimport torch\nlook()\n{STEP}look()",
    "DDP": "look()\nimport torch, torch.distributed as dist\n"
    "def main():\n    dist.init_process_group('gloo')\n"
    "    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))\n    look()\n"
    "    model(torch.ones(2, 4)).sum().backward()\n    dist.barrier()\n    dist.destroy_process_group()\nmain()\nlook()",
    "settings": "import os, torch\nlook()\n"
    + INDUCTOR
    + "os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', 'cache')\n"
    "import torch._inductor.config\nfrom torch._inductor.runtime.runtime_utils import cache_dir\nlook()\n"
    "os.environ['SHOWN'] = cache_dir()\nlook()",
    "settings in a function": f"import os, torch\ndef choose():\n    os.environ.update(TORCHDYNAMO_VERBOSE='1')\n"
    f"    os.environ['TORCHINDUCTOR_FORCE_DISABLE_CACHES'] = '1'\nlook()\nchoose()\nlook()\n{STEP}look()",
    "dynamo first": f"import torch._dynamo\nimport torch\nlook()\n{STEP}look()\ntorch.manual_seed(3)\nlook()",
    "compiled": "import torch\nlook()\nfunction = torch.compile(lambda one: one.sin() + 1, backend='eager')\nlook()\n"
    "function(torch.ones(3))\nlook()",
    "loader": "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\nlook()\n"
    "loader = DataLoader(TensorDataset(torch.ones(6, 2)), num_workers=1)\nlook()\nlist(loader)\nlook()",
    "parts": "from torch import nn\nlook()\nimport torch.nn.functional as F\nfrom torch.optim.lr_scheduler import StepLR\nlook()\n"
    "from torch import _dynamo\nimport torch.onnx, sympy\nlook()",
    "caught": "import importlib, sys\nlook()\ntry:\n    import torch.no_such_part\nexcept ImportError:\n    look()\n"
    "torch = importlib.import_module('torch')\nnames = [name for name in sys.modules if name.startswith('numpy')]\n"
    "numpy = importlib.import_module('numpy.linalg')\nlook()",
}


PLACE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu",
}  # fmt: skip
# What a server guesses for these scripts.
PRELOAD = ("torch", "torch.nn", "torch.optim.lr_scheduler", *IMPORTED_LATER["torch"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "looking.py").write_text(LOOK)
    for name, text in SCRIPTS.items():
        (folder / f"{name}.py").write_text(f"from looking import look\n{text}\n")
    return folder


@pytest.fixture(scope="module")
def executed(place: Path) -> dict[str, Any]:
    """What each script sees in an interpreter of its own."""
    with Forks(place, env=environment()) as forks:  # no variable that an earlier test has left
        return _seen(forks, is_forked=False)


def _seen(forks: Forks, *, is_forked: bool) -> dict[str, Any]:
    results = forks.run(*[[f"{name}.py"] for name in SCRIPTS], is_forked=is_forked, env=PLACE, timeout_s=200)
    assert [(one.code, one.err) for one in results] == [(0, "")] * len(SCRIPTS)
    assert forks.lost is None
    return {name: json.loads((forks.folder / f"seen.{name}.py").read_text()) for name in SCRIPTS}


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_modules_variables_and_settings_are_the_same_at_each_line(
    place: Path, executed: dict[str, Any]
) -> None:
    program = [f"{next(iter(SCRIPTS))}.py"]
    with Forks(place, program=program, preload=PRELOAD, env=environment()) as forks:
        assert forks.wait(120) is None
        forked = _seen(forks, is_forked=True)
    for name, text in SCRIPTS.items():
        waits, ours = forked[name]
        assert waits
        theirs = executed[name][1]
        assert len(ours) == len(theirs) == text.count("look()")
        different = [
            {key: _difference(one[key], other[key]) for key in other if one[key] != other[key]}
            for one, other in zip(ours, theirs, strict=True)
        ]
        assert different == [{}] * len(ours), name


def _difference(ours: Any, theirs: Any) -> Any:
    if isinstance(ours, dict):
        return {
            key: (ours.get(key), theirs.get(key))
            for key in {*ours, *theirs}
            if ours.get(key) != theirs.get(key)
        }
    return [one for one in ours if one not in theirs], [one for one in theirs if one not in ours]


def test_a_package_that_another_one_hides_is_not_taken_for_it(tmp_path: Path) -> None:
    """What waits belongs to the package that the server has found, not to one that the worker found instead."""
    (tmp_path / "own" / "xml").mkdir(parents=True)
    (tmp_path / "own" / "xml" / "__init__.py").write_text("name = 'mine'")
    (tmp_path / "own" / "xml" / "dom.py").write_text("name = 'mine, too'")
    (tmp_path / "train.py").write_text(
        "import sys\nsys.path.insert(0, 'own')\nimport importlib.machinery, importlib.util\n"
        "spec = importlib.machinery.PathFinder.find_spec('xml')\n"
        "sys.modules['xml'] = found = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(found)\n"
        "import xml.dom\nprint(xml.name, xml.dom.name)"
    )
    with Forks(tmp_path, program=["train.py"], preload=["xml.dom"]) as forks:
        assert forks.wait() is None
        forked, plain = forks.run(["train.py"]), forks.run(["train.py"], is_forked=False)
        assert forks.lost is None
    assert forked == plain
    assert forked[0].out == "mine mine, too\n", forked


def test_an_import_shows_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import json.no_such_part\n")
    (tmp_path / "train.py").write_text("import json\nimport broken\n")
    with Forks(tmp_path, program=["train.py"], preload=["json.tool"]) as forks:
        assert forks.wait() is None
        forked, plain = forks.run(["train.py"]), forks.run(["train.py"], is_forked=False)
        assert forks.lost is None
    assert forked == plain
    assert "No module named 'json.no_such_part'" in forked[0].err


def test_what_an_import_has_c_print_is_in_no_output_of_a_worker(tmp_path: Path) -> None:
    """C keeps it until its buffer is full, and a forked process has a copy of that."""
    (tmp_path / "prints.py").write_text("import ctypes\nctypes.CDLL(None).printf(b'imported')\n")
    (tmp_path / "use.py").write_text("import prints\nprint('used')")
    with Forks(tmp_path, program=["use.py"], preload=["prints"], env=environment()) as forks:
        assert forks.run(["use.py"], ["use.py"]) == [Result(0, None, "used\n", "")] * 2
        assert forks.lost is None


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


def test_exit_functions_are_those_of_the_modules_that_a_worker_has_imported(tmp_path: Path) -> None:
    for name in ("one", "two"):
        text = f"import atexit\ndef end():\n    print('end of {name}')\natexit.register(end)\n"
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "train.py").write_text("import atexit, one\natexit.register(print, 'end')\n")
    with Forks(tmp_path, program=["train.py"], preload=["one", "two"]) as forks:
        assert forks.wait() is None
        forked, plain = forks.run(["train.py"]), forks.run(["train.py"], is_forked=False)
        assert forks.lost is None
    assert plain[0].out == "end\nend of one\n"
    if sys.version_info < (3, 14):  # since then, functions that are forgotten at the end are called
        assert forked == plain
