"""What is shipped: the wheel and the source archive hold what they must, and nothing else."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from scripts.environment import turn
from tests.support.command import ran
from yaml import safe_load

import dsl
import dsl._core

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("dsl", "dslrun")
TOOLS = (
    *("dsl-ssh", "dsl-report", "dsl-elastic", "dsl-ps", "dsl-top", "dsl-stacks", "dsl-attach", "dsl-wait"),
    "dsl-warm",
)

pytestmark = pytest.mark.timeout(900)  # the first build of the extension may happen here


def build(*arguments: str) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = ran([sys.executable, "-m", *arguments], 900, cwd=ROOT, env=environ)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with turn():
        build("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), ".")
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Path:
    """Folder holding the wheel's unpacked metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" in name]
        archive.extractall(wheel.parent, names)
    (folder,) = wheel.parent.glob("*.dist-info")
    return folder


def test_one_wheel_serves_every_python_from_3_10_on(wheel: Path) -> None:
    assert re.fullmatch(r"dsl-[\w.]+-cp310-abi3-(manylinux|linux|musllinux)\w+\.whl", wheel.name)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    sources = {
        path.relative_to(ROOT / "python").as_posix()
        for package in ("dsl", "dsl_launcher")
        for path in (ROOT / "python" / package).rglob("*")
        if path.suffix in {".py", ".pyi"} or path.parent.name in {"completions", "stand_in"}
        if path.is_file()
    }
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert {"dsl/_core.pyi", "dsl/cli/deepspeed.py"} <= sources
    scripts = {f"dsl-{dsl.__version__}.data/scripts/{name}" for name in (*COMMANDS, *TOOLS)}
    data = ROOT / "python" / "dsl.data"
    beside = {f"dsl-{dsl.__version__}.data/{path.relative_to(data).as_posix()}" for path in installed_files()}
    assert shipped == sources | scripts | beside | {"dsl/_core.abi3.so", "dsl/py.typed"}


def installed_files() -> list[Path]:
    """Man pages and completion scripts, in the checkout."""
    found = [path for path in (ROOT / "python" / "dsl.data" / "data").rglob("*") if path.is_file()]
    assert len(found) >= 3 * len((*COMMANDS, *TOOLS))
    return found


def test_the_wheel_brings_the_licence(metadata: Path) -> None:
    assert "Apache License" in (metadata / "licenses" / "LICENSE").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def prefix(wheel: Path) -> Path:
    """Where the wheel is installed, as a user's installer does it."""
    folder = wheel.parent / "prefix"
    build("pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", "--prefix", str(folder),
          str(wheel))  # fmt: skip
    return folder


@pytest.mark.parametrize("command", [*COMMANDS, *TOOLS])
def test_an_installed_command_runs_in_the_interpreter_it_was_installed_with(
    prefix: Path, command: str
) -> None:
    script = prefix / "bin" / command
    # An interpreter whose path is too long for a first line is named in the second.
    first = script.read_text(encoding="utf-8").splitlines()[:2]
    assert first[0].startswith("#!/")
    assert sys.executable in "".join(first)
    result = ran([script, "--help"], env=environment(prefix), check=True)
    assert result.stdout.startswith(f"usage: {command} [OPTIONS]")


@pytest.mark.proc
@pytest.mark.parametrize("command", ["torchrun", "deepspeed"])
def test_an_installed_command_stands_in_for_another(prefix: Path, command: str) -> None:
    """An installer keeps the modes of the files, and the folder does not depend on where it lies."""
    words = [prefix / "bin" / "dslrun", "--stand-in", "--", command, "--version"]
    result = ran(words, env=environment(prefix), check=True)
    assert result.stdout.split()[0] == {"torchrun": "dslrun", "deepspeed": "dsl"}[command]


@pytest.mark.proc
@pytest.mark.parametrize("command", COMMANDS)
def test_an_installed_command_brings_no_module_that_a_launch_does_not_need(
    prefix: Path, command: str
) -> None:
    """The scripts that installers write for entry points import `re`."""
    words = [sys.executable, "-X", "importtime", str(prefix / "bin" / command), "--no_python", "true"]
    result = ran(words, 30, env=environment(prefix))
    names = set(re.findall(r"^import time:.*\|\s+(\S+)$", result.stderr, re.MULTILINE))
    assert result.returncode == 0, result.stderr
    assert "dsl.agent.session" in names
    assert names & {"re", "argparse", "enum", "gettext", "locale"} == set()


def environment(prefix: Path) -> dict[str, str]:
    """An environment in which the installed package is found, and one worker is started."""
    bases = {"base": str(prefix), "platbase": str(prefix)}
    packages = sysconfig.get_path("platlib", vars=bases)
    return {**os.environ, "PYTHONPATH": packages, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "1"}


def test_a_launcher_does_not_pull_in_torch(metadata: Path) -> None:
    fields = Parser().parsestr((metadata / "METADATA").read_text(encoding="utf-8"))
    needed = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[<>=! ;]", line)[0] for line in needed} == {"psutil", "nvidia-ml-py"}


def test_the_description_has_no_link_that_works_in_a_checkout_only(metadata: Path) -> None:
    fields = Parser().parsestr((metadata / "METADATA").read_text(encoding="utf-8"))
    description = fields.get_payload()
    assert isinstance(description, str)
    links = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", description, re.MULTILINE)
    assert {inline or reference for inline, reference in links} >= {project_url(fields, "Documentation")}
    assert [link for pair in links for link in pair if link and not link.startswith(("https://", "#"))] == []


def project_url(fields: Message, name: str) -> str:
    """A project's address by its label."""
    urls = dict(line.split(", ", 1) for line in fields.get_all("Project-URL", []))
    return urls[name]


def test_there_is_one_version(metadata: Path) -> None:
    manifest = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    stated = re.search(r'^version = "([^"]+)"', manifest, re.MULTILINE)
    assert stated is not None
    fields = Parser().parsestr((metadata / "METADATA").read_text(encoding="utf-8"))
    versions = {fields["Version"], dsl.__version__, dsl._core.__version__, importlib.metadata.version("dsl")}
    versions.add(yaml("CITATION.cff")["version"])
    versions.add(yaml("packaging/recipe/recipe.yaml")["context"]["version"])
    assert versions == {stated[1]}


def yaml(path: str) -> dict[str, Any]:
    """A file of this checkout."""
    read: dict[str, Any] = safe_load((ROOT / path).read_text(encoding="utf-8"))
    return read


def test_the_conda_package_needs_what_the_wheel_needs(metadata: Path) -> None:
    fields = Parser().parsestr((metadata / "METADATA").read_text(encoding="utf-8"))
    needed = {line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line}
    recipe = yaml("packaging/recipe/recipe.yaml")
    assert {line.replace(" ", "") for line in recipe["requirements"]["run"]} == needed | {"python"}
    assert recipe["requirements"]["host"][0] == f"python {fields['Requires-Python'].removeprefix('>=')}.*"


def test_what_messages_and_pages_tell_users_to_install_can_be_installed() -> None:
    """The package is on no index, so its extras need the address of the repository."""
    packages = {re.split(r"[^\w-]", one)[0] for one in importlib.metadata.requires("dsl") or ()}
    extras = set(importlib.metadata.metadata("dsl").get_all("Provides-Extra") or ())
    named: dict[str, set[str]] = {"packages": set(), "extras": set()}
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("python/dsl/**/*.py")):
        text = path.read_text(encoding="utf-8")
        for name, extra, rest in re.findall(
            r"pip install ['\"]?(?!git\+|-)([\w.-]+)(?:\[(\w+)\])?(.{0,7})", text
        ):
            assert name != "dsl" or rest.startswith(" @ git+"), path
            named["extras" if extra else "packages"].add(extra or name)
    assert {"all", "tune"} <= named["extras"] <= extras
    assert {"py-spy", "textual", "matplotlib", "optuna", "debugpy", "prometheus-client"} <= named["packages"]
    assert named["packages"] <= packages | {"python-etcd", "cloudpickle"}  # torch and notebooks need these


def test_the_extra_all_brings_every_other_one_but_torch(metadata: Path) -> None:
    fields = Parser().parsestr((metadata / "METADATA").read_text(encoding="utf-8"))
    needed: dict[str, set[str]] = {}
    for line in fields.get_all("Requires-Dist", []):
        package, _, extra = line.partition(" ; extra == ")
        needed.setdefault(extra.strip("'\""), set()).add(package)
    (whole,) = needed.pop("all")
    assert set(whole.removeprefix("dsl[").rstrip("]").split(",")) == set(needed) - {"", "torch"}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts of a release can be imported."""
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.mark.usefixtures("scripts")
def test_the_notices_have_the_licences_of_the_crates_in_the_extension_and_no_others() -> None:
    notices = importlib.import_module("notices")
    crates = notices.linked_crates(("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-musl"))
    names = {crate["name"] for crate in crates}
    assert {"ring", "snow", "pyo3", "rustix", "libc"} <= names
    assert names & {"proptest", "shuttle", "syn", "cc", "dsl-engine"} == set()
    text = notices.text_of(crates)
    assert all(f"\n{crate['name']} {crate['version']} (" in text for crate in crates)
    assert "Copyright 2015-2025 Brian Smith" in text  # ring's


@pytest.mark.usefixtures("scripts")
def test_a_crate_without_a_licence_file_ends_the_release(tmp_path: Path) -> None:
    notices = importlib.import_module("notices")
    crate = {
        "name": "bare",
        "version": "1.0.0",
        "license": "MIT",
        "manifest_path": str(tmp_path / "Cargo.toml"),
    }
    with pytest.raises(SystemExit, match=r"bare 1\.0\.0 \(MIT\) has no licence file"):
        notices.text_of([crate])


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("lost", ["licenses/third-party/crates.txt", "sboms/dsl.cyclonedx.json"])
def test_a_wheel_without_the_papers_of_its_crates_is_not_released(tmp_path: Path, lost: str) -> None:
    release = importlib.import_module("release")
    texts = dict.fromkeys(
        ("licenses/third-party/crates.txt", "licenses/third-party/rust-standard-library.html"), ""
    )
    texts["sboms/dsl.cyclonedx.json"] = '{"components": [{"name": "ring"}]}'
    whole, broken = tmp_path / "whole.whl", tmp_path / "broken.whl"
    for path, names in ((whole, set(texts)), (broken, set(texts) - {lost})):
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(f"dsl-1.dist-info/{name}", texts[name])
    assert release.lacking_papers(whole) == []
    assert release.lacking_papers(broken) != []


def test_the_source_archive_can_build_the_package(tmp_path: Path) -> None:
    build("maturin", "sdist", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    crates = {
        "rust/engine/Cargo.toml",
        "rust/engine/src/lib.rs",
        "rust/control/src/lib.rs",
        "rust/bindings/src/lib.rs",
    }
    assert crates <= names
    assert {"Cargo.lock", "LICENSE", "README.md", "pyproject.toml", "python/dsl/_core.pyi"} <= names
    assert "python/dsl_launcher/run.py" in names
    assert {f"python/dsl.data/scripts/{command}" for command in (*COMMANDS, *TOOLS)} <= names
    assert {path.relative_to(ROOT).as_posix() for path in installed_files()} <= names
