"""A warm server is never stale: whatever was edited, its workers see what executed workers see.

Each test compares a worker of a warm server with an executed one, and asks which server has forked it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import random
import shutil
import subprocess
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.warm import Place

pytestmark = pytest.mark.timeout(600)

Edit = Callable[[], object]

SCRIPT = """
import json, os, sys
import {imports}
found = {{
    "modules": {{name: getattr(module, "VALUE", None) for name, module in sorted(sys.modules.items())
                if getattr(module, "VALUE", None) is not None}},
    "files": {{name: sys.modules[name].__file__ for name in ("tiny", "other") if name in sys.modules}},
    "path": [one for one in sys.path],
    "program": os.readlink("/proc/self/exe"),
    "variables": sorted(item for item in os.environ.items() if item[0].startswith("SEEN_")),
    "versions": None,
}}
try:
    from importlib import metadata
    found["versions"] = sorted((one.metadata["Name"], one.version) for one in metadata.distributions())
except Exception as error:
    found["versions"] = repr(error)
parent = open("/proc/%d/stat" % os.getppid()).read().rpartition(")")[2].split()
json.dump(found, open(sys.argv[1], "w"))
json.dump([int(parent[1]), "tiny" in {early!r}.split()], open(sys.argv[1] + ".server", "w"))
"""


class World:
    """A small installation of Python with tiny modules, and a script that imports them."""

    def __init__(self, folder: Path, place: Place) -> None:
        self.place = place
        self.project = folder / "project"
        self.project.mkdir()
        venv.create(folder / "venv", symlinks=True, with_pip=False)
        self.python = folder / "venv" / "bin" / "python"
        [self.site] = (folder / "venv" / "lib").glob("python*/site-packages")
        # `dsl` is found by the command, whose interpreter is another one.
        self.script = self.project / "train.py"
        self.more: dict[str, str] = {}
        self.preload: tuple[str, ...] = ()
        self.module("tiny", "1")
        self.module("other", "1")
        self.imports("tiny")
        self._runs = 0

    def module(self, name: str, value: str) -> Path:
        """Write an installed module."""
        path = self.site / f"{name}.py"
        path.write_text(f"VALUE = {value}\n")
        return path

    def write(self, files: Mapping[str, str]) -> None:
        """Write files below ``site``, where packages are installed, or ``project``; a name that ends in / is a folder."""
        for name, text in files.items():
            where, _, rest = name.partition("/")
            path = {"site": self.site, "project": self.project}[where] / rest
            (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text(text.format(project=self.project, site=self.site))

    def imports(self, *names: str, preload: bool = False) -> None:
        """Write the script. ``preload``: of modules that do not lie where packages are installed."""
        self.preload = ("--preload", ",".join(names)) if preload else ()
        self.script.write_text(SCRIPT.format(imports=", ".join(names), early=" ".join(names)))

    def run(self, method: str) -> tuple[dict[str, object], int]:
        """What a worker sees, and the parent of its parent: the server, if it is a branch's."""
        self._runs += 1
        out = self.project / f"out.{self._runs}"
        environ = self.place.environ(self.more)
        words = self.place.command(*self.preload, str(self.script), str(out), method=method)
        done = ran(
            words,
            cwd=self.project,
            env={**environ, "PYTHON_EXEC": str(self.python)},
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stderr
        assert "fork server" not in done.stderr, done.stderr
        found = json.loads(out.read_text())
        server = json.loads((self.project / f"{out.name}.server").read_text())[0]
        out.unlink()
        (self.project / f"{out.name}.server").unlink()
        return found, server

    def settle(self) -> int:
        """Start jobs until one server serves two of them: what was written just now counts as doubtful."""

        def served() -> int:
            first, second = self.run("warm")[1], self.run("warm")[1]
            return first if first == second and first in {one.pid for one in self.place.told()} else 0

        return until(served, 30)

    def differs(self) -> tuple[object, object] | None:
        """What an executed and a warm worker see, if that is not the same."""
        warm, plain = self.run("warm")[0], self.run("spawn")[0]
        return None if warm == plain else (plain, warm)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with Place() as place:
        yield World(tmp_path, place)


WRITTEN = {
    "edit": {"site/tiny.py": "VALUE = 12\n"},
    "folder in its place": {"site/tiny/__init__.py": "VALUE = 'package'\n"},
    "new package": {
        "site/fresh-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: fresh\nVersion: 1.0\n"
    },
    "new version": {
        "site/known-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: known\nVersion: 1.1\n"
    },
    "new pth": {"project/extra/": "", "site/extra.pth": "{project}/extra\n"},
    "pth with code": {"site/code.pth": "import os; os.environ['SEEN_BY_PTH'] = 'yes'\n"},
    "sitecustomize": {"site/sitecustomize.py": "import os; os.environ['SEEN_CUSTOM'] = 'yes'\n"},
    "local module": {"project/tiny.py": "VALUE = 'local'\n"},
    "local package": {"project/tiny/__init__.py": "VALUE = 'local package'\n"},
}


def _edit_of_the_same_size(world: World) -> None:
    world.module("tiny", "2")
    # Within one second Python would take what it has compiled.
    shutil.rmtree(world.site / "__pycache__", ignore_errors=True)


def _edit_with_an_old_time(world: World) -> None:
    path = world.site / "tiny.py"
    about = path.stat()
    world.module("tiny", "3")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    # Python itself goes by size and time of change, and would take what it has compiled.
    shutil.rmtree(world.site / "__pycache__", ignore_errors=True)


def _another_file_in_its_place(world: World) -> None:
    path = world.site / "tiny.py"
    about = path.stat()
    (world.site / "next.tmp").write_text("VALUE = 4\n")
    os.utime(world.site / "next.tmp", ns=(about.st_atime_ns, about.st_mtime_ns))
    (world.site / "next.tmp").rename(path)
    shutil.rmtree(world.site / "__pycache__", ignore_errors=True)


def _python_path(world: World) -> None:
    folder = world.project / "before"
    folder.mkdir()
    (folder / "tiny.py").write_text("VALUE = 'before'\n")
    world.more["PYTHONPATH"] = str(folder)


def _local_module_that_leads_elsewhere(world: World) -> None:
    world.write({"project/mine.py": "import other\nVALUE = 'mine'\n"})
    world.imports("tiny", "mine")


EDITS: dict[str, Callable[[World], object]] = {
    **{name: functools.partial(World.write, files=files) for name, files in WRITTEN.items()},
    "edit of the same size": _edit_of_the_same_size,
    "edit with an old time": _edit_with_an_old_time,
    "another file in its place": _another_file_in_its_place,
    "an import of another module": lambda world: world.imports("tiny", "other"),
    "changed variable": lambda world: world.more.update(SEEN_BY_ALL="changed"),
    "python path": _python_path,
    "local module that leads elsewhere": _local_module_that_leads_elsewhere,
}


@pytest.mark.parametrize("edit", EDITS)
def test_after_an_edit_a_worker_sees_what_an_executed_one_sees(world: World, edit: str) -> None:
    world.write({"site/known-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: known\nVersion: 1.0\n"})
    world.settle()
    if edit == "sitecustomize" and importlib.util.find_spec("sitecustomize") is not None:
        pytest.skip("needs a Python without a sitecustomize of its own")
    before = world.run("spawn")[0]
    EDITS[edit](world)
    assert world.differs() is None
    assert world.run("spawn")[0] != before or edit == "new pth", "the edit has changed nothing"
    assert world.differs() is None


def _put_into(archive: Path, value: str) -> None:
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("inside.py", f"VALUE = {value}\n")
        file.writestr("below/deep.py", f"VALUE = {value}\n")


def _archive(world: World) -> Edit:
    archive = world.project / "many.zip"
    _put_into(archive, "1")
    world.more["PYTHONPATH"] = f"{archive}:{archive}/below"
    world.imports("tiny", "inside", "deep", preload=True)
    return lambda: _put_into(archive, "'another'")


def _archive_of_a_pth(world: World) -> Edit:
    archive = world.project / "many.egg"
    (world.site / "many.pth").write_text(f"{archive}\n")
    return lambda: _put_into(archive, "1")


def _folder_that_a_pth_names(world: World) -> Edit:
    (world.site / "more.pth").write_text(f"# folders\n{world.project / 'later'}\n")
    return (world.project / "later").mkdir


def _user_site(world: World) -> Edit:
    config = world.site.parents[2] / "pyvenv.cfg"
    config.write_text(config.read_text().replace("packages = false", "packages = true"))
    world.more["PYTHONUSERBASE"] = str(world.project / "user")
    name = world.site.parent.name
    return lambda: (world.project / "user" / "lib" / name / "site-packages").mkdir(parents=True)


def _another_interpreter(world: World) -> Edit:
    """A link on the way to the interpreter is switched."""
    first, current = world.python.resolve(), world.project / "current"
    world.python.unlink()
    world.python.symlink_to(current)
    current.symlink_to(first)

    def switch() -> None:
        shutil.copy(first, world.project / "another")
        current.unlink()
        current.symlink_to("another")

    return switch


def _library_before_another(world: World) -> Edit:
    """The loader finds another library of the same name first."""
    [library] = [
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libm.so" in line
    ][:1]
    folder = world.project / "libraries"
    folder.mkdir()
    world.more["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    text = f"VALUE = [line.split()[-1] for line in open('/proc/self/maps') if '{Path(library).name}' in line][0]\n"
    (world.site / "tiny.py").write_text(f"import math\n{text}")
    return lambda: shutil.copy(library, folder)


OPENED = "try:\n    VALUE = open('settings.ini').read()\nexcept OSError:\n    VALUE = 'none'\n"
LISTED = "import glob\nVALUE = sorted(glob.glob('plugins/*.plugin'))\n"
PATH_READ = "import pathlib\nVALUE = pathlib.Path('settings.ini').read_text()\n"
PARTS = "import spread.one\nVALUE = len(list(spread.__path__))\n"
FAST = "try:\n    import package.fast\n    VALUE = True\nexcept ImportError:\n    VALUE = False\n"
BEFORE_AND_AFTER: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "file that is read": (
        {"site/tiny.txt": "first", "site/tiny.py": "VALUE = open('{site}/tiny.txt').read()\n"}, {"site/tiny.txt": "second"},
    ),
    "file that is read as a path": (
        {"project/settings.ini": "first", "site/tiny.py": PATH_READ}, {"project/settings.ini": "second"},
    ),
    "file that was missing": (
        {"site/tiny.py": "import os\nVALUE = os.path.exists('settings.ini')\n"}, {"project/settings.ini": ""},
    ),
    "file that could not be opened": ({"site/tiny.py": OPENED}, {"project/settings.ini": "some"}),
    "folder that is listed": ({"project/plugins/": "", "site/tiny.py": LISTED}, {"project/plugins/a.plugin": ""}),
    # A package without a text of its own takes all folders of its name.
    "part of a package": ({"site/spread/one.py": "VALUE = 1\n", "site/tiny.py": PARTS}, {"project/spread/": ""}),
    "module in a package": ({"site/package/__init__.py": "", "site/tiny.py": FAST}, {"site/package/fast.py": ""}),
}  # fmt: skip


def _written(world: World, before: dict[str, str], after: dict[str, str]) -> Edit:
    world.write(before)
    return lambda: world.write(after)


PREPARED: dict[str, Callable[[World], Edit]] = {
    **{
        name: functools.partial(_written, before=before, after=after)
        for name, (before, after) in BEFORE_AND_AFTER.items()
    },
    "archive": _archive,
    "archive of a pth": _archive_of_a_pth,
    "folder that a pth names": _folder_that_a_pth_names,
    "user site": _user_site,
    "another interpreter": _another_interpreter,
    "library before another": _library_before_another,
}


@pytest.mark.parametrize("prepare", PREPARED)
def test_what_a_start_would_read_is_read_again(world: World, prepare: str) -> None:
    """What comes, goes or changes where a start looks, although no module that was imported lies there."""
    edit = PREPARED[prepare](world)
    world.settle()
    before = world.run("spawn")[0]
    edit()
    assert world.differs() is None
    assert world.run("spawn")[0] != before, "the edit has changed nothing"
    world.settle()
    assert world.differs() is None


def test_a_server_that_was_replaced_ends_when_the_job_has_met_the_branch_of_the_next(world: World) -> None:
    """The job is forked: the kernel shows that the branch descends from the server that was called."""
    server = world.settle()
    world.module("tiny", "7")
    assert world.run("warm")[1] != server
    until(lambda: processes.find(server) is None)


def test_what_is_unchanged_is_served_by_the_same_server(world: World) -> None:
    server = world.settle()
    jobs = world.place.server().jobs
    for count in range(1, 4):
        assert world.run("warm")[1] == server
        assert world.place.server().jobs == jobs + count
    # A file that no import could find, and new times of a folder, are no change.
    (world.site / "notes.txt").write_text("nothing")
    os.utime(world.site)
    (world.project / "data.csv").write_text("nothing")
    assert world.run("warm")[1] == server


def test_what_a_job_writes_into_its_folder_is_no_change(world: World) -> None:
    """Not even if modules look for installed packages there, or ask whether it is there."""
    (world.site / "tiny.py").write_text(
        "import os, pkgutil\nfrom importlib import metadata\n"
        "VALUE = [len(list(metadata.entry_points())) > 0, os.path.isdir('.'), os.path.exists(os.getcwd())]\n"
        "VALUE += [one.name for one in pkgutil.iter_modules(['.'])]\n"
    )
    server = world.settle()
    (world.project / "checkpoint.pt").write_text("weights")
    (world.project / "logs").mkdir()
    assert world.run("warm")[1] == server
    assert world.differs() is None
    (world.project / "fresh.py").touch()
    assert world.run("warm")[1] != server
    assert world.differs() is None


def test_a_library_that_was_changed_where_it_lies_is_loaded_anew(world: World) -> None:
    """A copy of an extension of the standard library, as packages install theirs."""
    modules = [importlib.import_module(f"_{name}") for name in ("csv", "lzma")]  # the first may be built in
    extension = next((one for one in modules if getattr(one, "__file__", None)), None)
    if extension is None:
        pytest.skip("needs a Python with extensions of its own")
    where = Path(str(extension.__file__))
    shutil.copy(where, world.site / where.name)
    world.more["PYTHONPATH"] = str(world.site)
    world.imports("tiny", extension.__name__.removeprefix("_"))
    server = world.settle()
    shutil.copy(where, world.site / "next.tmp")
    (world.site / "next.tmp").rename(world.site / where.name)
    assert world.run("warm")[1] != server
    assert world.differs() is None


@pytest.mark.parametrize("edits", [10, pytest.param(100, marks=pytest.mark.stress)])
def test_random_edits(world: World, edits: int) -> None:
    dice = random.Random(edits)
    for number in range(edits):
        kind = dice.choice(
            ["edit", "same", "old", "variable", "script", "local", "unlocal", "package", "none"]
        )
        if kind == "edit":
            world.module(dice.choice(["tiny", "other"]), str(number + 100))
        elif kind == "same":
            world.module("tiny", str(dice.randrange(10)))
            shutil.rmtree(world.site / "__pycache__", ignore_errors=True)
        elif kind == "old":
            _edit_with_an_old_time(world)
            world.module("other", "9")
        elif kind == "variable":
            world.more["SEEN_BY_ALL"] = str(dice.randrange(2))
        elif kind == "script":
            world.imports(*dice.choice([("tiny",), ("other",), ("tiny", "other"), ("other", "tiny")]))
        elif kind == "local":
            (world.project / "other.py").write_text(f"VALUE = 'local {number}'\n")
        elif kind == "unlocal":
            (world.project / "other.py").unlink(missing_ok=True)
            shutil.rmtree(world.project / "__pycache__", ignore_errors=True)
        elif kind == "package":
            folder = world.site / f"fresh{dice.randrange(3)}-1.0.dist-info"
            folder.mkdir(exist_ok=True)
            (folder / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {folder.name[:6]}\nVersion: {number}\n"
            )
        for _ in range(dice.randrange(3)):
            world.run("warm")
        assert world.differs() is None, (number, kind)


def test_a_module_that_is_edited_while_it_is_imported(world: World) -> None:
    """The server cannot know what it has read, and serves no second job."""
    path = world.module("tiny", "1")
    slow = "import os, time\nVALUE = 1\nif os.path.exists('hold'):\n    open('held', 'w').close()\n"
    slow += "    while os.path.exists('hold'):\n        time.sleep(0.003)\n"
    path.write_text(slow)
    hold, held = world.project / "hold", world.project / "held"
    hold.touch()
    words = world.place.command(str(world.script), str(world.project / "first"))
    environ = {**world.place.environ(world.more), "PYTHON_EXEC": str(world.python)}
    with subprocess.Popen(
        words, cwd=world.project, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as job:
        until(held.exists)
        path.write_text("VALUE = 2\n")
        hold.unlink()
        assert job.stderr is not None
        said = job.stderr.read()
    assert job.returncode == 0, said
    assert world.differs() is None
    assert world.run("warm")[0]["modules"] == {"tiny": 2}
