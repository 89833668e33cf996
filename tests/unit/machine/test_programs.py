"""Programs and packages, and their versions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dsl.machine import programs
from dsl.machine.programs import find_package, find_programs, read_constants, read_version

# The first lines of what each program has said on a machine; MVAPICH's are those of its documentation.
HYDRA = """HYDRA build details:
    Version:                                 4.0.2
    Release Date:                            Thu Apr  7 12:34:45 CDT 2022
    CC:                              gcc  -Wl,-z,relro
    Configure options:                       '--prefix=/usr'
"""
SAID = {
    "ssh": ("OpenSSH_9.2p1 Debian-2+deb12u6, OpenSSL 3.0.19 27 Jan 2026\n", "", "9.2p1"),
    "pdsh": ("pdsh-2.34 (+debug)\nrcmd modules: ssh,rsh,exec (default: rsh)\n", "", "2.34"),
    "srun": ("slurm-wlm 22.05.8\n", "", "22.05.8"),
    "nvcc": (
        "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 12.4, V12.4.131\n",
        "",
        "12.4",
    ),
    "mpirun": ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...\n", "openmpi", "5.0.11"),
    "mpirun ": (HYDRA, "mpich", "4.0.2"),
    "mpirun  ": (
        "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101 (id: 1)\nCopyright\n",
        "impi",
        "2021.18",
    ),
    "mpirun   ": (HYDRA.replace("4.0.2", "3.3").replace("/usr", "/opt/mvapich2"), "mvapich", "3.3"),
    "mpirun    ": ("usage: mpirun\n", "", ""),
}


@pytest.mark.parametrize("name", SAID)
def test_a_program_says_what_it_is(name: str) -> None:
    said, kind, version = SAID[name]
    assert read_version(name.strip(), said) == (kind, version)
    assert read_version(name.strip(), "") == ("", "")


@pytest.mark.proc
def test_programs_are_found_on_path_and_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer, or cannot run, holds nobody."""
    monkeypatch.setattr(programs, "DEADLINE_S", 0.5)
    for name, text in {"pdsh": "echo pdsh-2.34 >&2", "mpirun": "exec sleep 60", "srun": "exit 1"}.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n" if name != "srun" else "#!/no/such\n")
        path.chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_programs(environ) == {
        "ssh": None,
        "pdsh": {"path": f"{tmp_path}/pdsh", "kind": "", "version": "2.34"},
        "mpirun": {"path": f"{tmp_path}/mpirun", "kind": "", "version": ""},
        "srun": {"path": f"{tmp_path}/srun", "kind": "", "version": ""},
        "nvcc": None,
    }


CONSTANTS = """from typing import Optional
__version__ = '2.9.0+cu128'
debug = False
cuda: Optional[str] = '12.8'
hip: Optional[str] = None
later: str
version = __version__
info={'version': '2.9', 'hip': '', 'cuda': '12.8'}
"""


def test_constants_are_read_and_nothing_is_run(tmp_path: Path) -> None:
    path = tmp_path / "version.py"
    path.write_text(CONSTANTS)
    names = ("__version__", "cuda", "hip", "version", "later", "info", "none")
    assert read_constants(str(path), names) == {
        "__version__": "2.9.0+cu128",
        "cuda": "12.8",
        "hip": None,
        "info": "version 2.9, cuda 12.8",
    }
    path.write_text("raise SystemExit(")
    assert read_constants(str(path), names) == {}
    assert read_constants(str(tmp_path / "none"), names) == {}


def test_a_package_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "strange_torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    (folder / "version.py").write_text(CONSTANTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_package("strange_torch", "version.py", ("cuda", "hip"))
    assert found == {"version": "2.9.0+cu128", "path": str(folder), "cuda": "12.8", "hip": None}
    assert find_package("strange_torch", "none.py", ("cuda",)) == {"version": None, "path": str(folder)}
    assert find_package("no_such_package", "version.py", ()) is None
    assert "strange_torch" not in sys.modules
    pytest_itself = find_package("pytest", "none.py", ())
    assert pytest_itself is not None
    assert pytest_itself["version"] == pytest.__version__
