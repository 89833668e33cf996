"""A forked worker has imported what an executed one has at the same line, and its modules say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support import forks as support
from tests.support.forks import HIDDEN, Forks

from dsl.forkserver.guess import IMPORTED_LATER

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


@pytest.fixture(params=["forkserver", "warm"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the fork servers of a test stay after their job."""
    monkeypatch.setattr(support, "ARE_WARM", request.param == "warm")
    return str(request.param)


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
    with Forks(place) as forks:
        return _seen(forks, is_forked=False)


def _seen(forks: Forks, *, is_forked: bool) -> dict[str, Any]:
    results = forks.run(*[[f"{name}.py"] for name in SCRIPTS], is_forked=is_forked, env=PLACE, timeout_s=200)
    assert [(one.code, one.err) for one in results] == [(0, "")] * len(SCRIPTS)
    assert forks.lost is None
    return {name: json.loads((forks.folder / f"seen.{name}.py").read_text()) for name in SCRIPTS}


@pytest.mark.torch
@pytest.mark.timeout(400)
def test_modules_variables_and_settings_are_the_same_at_each_line(
    place: Path, executed: dict[str, Any], kind: str
) -> None:
    with Forks(place, program=[f"{next(iter(SCRIPTS))}.py"], preload=PRELOAD) as forks:
        assert forks.wait(120) is None
        forked = _seen(forks, is_forked=True)
    for name, text in SCRIPTS.items():
        waits, ours = forked[name]
        assert waits, kind
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


@pytest.mark.usefixtures("kind")
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


@pytest.mark.usefixtures("kind")
def test_an_import_shows_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import json.no_such_part\n")
    (tmp_path / "train.py").write_text("import json\nimport broken\n")
    with Forks(tmp_path, program=["train.py"], preload=["json.tool"]) as forks:
        assert forks.wait() is None
        forked, plain = forks.run(["train.py"]), forks.run(["train.py"], is_forked=False)
        assert forks.lost is None
    assert forked == plain
    assert "No module named 'json.no_such_part'" in forked[0].err
