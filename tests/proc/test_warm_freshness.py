"""A warm server is never stale: whatever was edited, its workers see what executed workers see.

Each test compares a worker of a warm server with an executed one, and asks which server has forked it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
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
        import subprocess

        done = subprocess.run(
            words,
            cwd=self.project,
            env={**environ, "PYTHON_EXEC": str(self.python)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
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


def _edit(world: World) -> None:
    world.module("tiny", "12")


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


def _folder_in_its_place(world: World) -> None:
    (world.site / "tiny").mkdir()
    (world.site / "tiny" / "__init__.py").write_text("VALUE = 'package'\n")


def _gone_module_of_another(world: World) -> None:
    world.imports("tiny", "other")


def _new_package(world: World) -> None:
    folder = world.site / "fresh-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fresh\nVersion: 1.0\n")


def _new_version(world: World) -> None:
    path = world.site / "known-1.0.dist-info" / "METADATA"
    path.write_text(path.read_text().replace("Version: 1.0", "Version: 1.1"))


def _new_pth(world: World) -> None:
    folder = world.project / "extra"
    folder.mkdir()
    (world.site / "extra.pth").write_text(f"{folder}\n")


def _pth_with_code(world: World) -> None:
    (world.site / "code.pth").write_text("import os; os.environ['SEEN_BY_PTH'] = 'yes'\n")


def _sitecustomize(world: World) -> None:
    (world.site / "sitecustomize.py").write_text("import os; os.environ['SEEN_CUSTOM'] = 'yes'\n")


def _changed_variable(world: World) -> None:
    world.more["SEEN_BY_ALL"] = "changed"


def _python_path(world: World) -> None:
    folder = world.project / "before"
    folder.mkdir()
    (folder / "tiny.py").write_text("VALUE = 'before'\n")
    world.more["PYTHONPATH"] = str(folder)


def _local_module(world: World) -> None:
    (world.project / "tiny.py").write_text("VALUE = 'local'\n")


def _local_package(world: World) -> None:
    (world.project / "tiny").mkdir()
    (world.project / "tiny" / "__init__.py").write_text("VALUE = 'local package'\n")


def _local_module_that_leads_elsewhere(world: World) -> None:
    (world.project / "mine.py").write_text("import other\nVALUE = 'mine'\n")
    world.imports("tiny", "mine")


EDITS = [
    _edit, _edit_of_the_same_size, _edit_with_an_old_time, _another_file_in_its_place, _folder_in_its_place,
    _gone_module_of_another, _new_package, _new_version, _new_pth, _pth_with_code, _sitecustomize,
    _changed_variable, _python_path, _local_module, _local_package, _local_module_that_leads_elsewhere,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=[one.__name__.strip("_") for one in EDITS])
def test_after_an_edit_a_worker_sees_what_an_executed_one_sees(world: World, edit: object) -> None:
    folder = world.site / "known-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: known\nVersion: 1.0\n")
    world.settle()
    if edit is _sitecustomize and importlib.util.find_spec("sitecustomize") is not None:
        pytest.skip("needs a Python without a sitecustomize of its own")
    before = world.run("spawn")[0]
    edit(world)  # type: ignore[operator]
    assert world.differs() is None
    assert world.run("spawn")[0] != before or edit is _new_pth, "the edit has changed nothing"
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


def _file_that_is_read(world: World) -> Edit:
    data = world.site / "tiny.txt"
    data.write_text("first")
    (world.site / "tiny.py").write_text(f"VALUE = open({str(data)!r}).read()\n")
    return lambda: data.write_text("second")


def _file_that_is_read_as_a_path(world: World) -> Edit:
    (world.project / "settings.ini").write_text("first")
    (world.site / "tiny.py").write_text("import pathlib\nVALUE = pathlib.Path('settings.ini').read_text()\n")
    return lambda: (world.project / "settings.ini").write_text("second")


def _file_that_was_missing(world: World) -> Edit:
    text = "import os\nVALUE = os.path.exists('settings.ini')\n"
    (world.site / "tiny.py").write_text(text)
    return (world.project / "settings.ini").touch


def _file_that_could_not_be_opened(world: World) -> Edit:
    text = "try:\n    VALUE = open('settings.ini').read()\nexcept OSError:\n    VALUE = 'none'\n"
    (world.site / "tiny.py").write_text(text)
    return lambda: (world.project / "settings.ini").write_text("some")


def _folder_that_is_listed(world: World) -> Edit:
    (world.project / "plugins").mkdir()
    (world.site / "tiny.py").write_text("import glob\nVALUE = sorted(glob.glob('plugins/*.plugin'))\n")
    return (world.project / "plugins" / "a.plugin").touch


def _part_of_a_package(world: World) -> Edit:
    """A folder of a package without a text of its own, which takes all folders of its name."""
    (world.site / "spread").mkdir()
    (world.site / "spread" / "one.py").write_text("VALUE = 1\n")
    text = "import spread.one\nVALUE = len(list(spread.__path__))\n"
    (world.site / "tiny.py").write_text(text)
    return (world.project / "spread").mkdir


def _module_in_a_package(world: World) -> Edit:
    (world.site / "package").mkdir()
    (world.site / "package" / "__init__.py").write_text(
        "try:\n    from package import fast as one\nexcept ImportError:\n    one = None\nVALUE = bool(one)\n"
    )
    world.imports("tiny", "package")
    return lambda: (world.site / "package" / "fast.py").write_text("")


PREPARED = [
    _archive, _archive_of_a_pth, _folder_that_a_pth_names, _user_site, _another_interpreter,
    _library_before_another,
    _file_that_is_read, _file_that_is_read_as_a_path, _file_that_was_missing, _file_that_could_not_be_opened,
    _folder_that_is_listed, _part_of_a_package, _module_in_a_package,
]  # fmt: skip


@pytest.mark.parametrize("prepare", PREPARED, ids=[one.__name__.strip("_") for one in PREPARED])
def test_what_a_start_would_read_is_read_again(world: World, prepare: Callable[[World], Edit]) -> None:
    """What comes, goes or changes where a start looks, although no module that was imported lies there."""
    edit = prepare(world)
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
    import subprocess

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
