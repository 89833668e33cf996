"""Build what is published, and check it: a wheel for each processor and C library, and the source archive.

    release.py [--out FOLDER] [--quick]

zig links the wheels for an old glibc, so that they run on every distribution of the last ten years, and for
musl. Each wheel carries the licences of its Rust crates (`notices.py`), and a list of them in the form of
CycloneDX (maturin). auditwheel, abi3audit and twine judge the files. The wheel for this machine is installed
into an empty folder, and runs a job; `try_wheels.py` tries all of them on other systems.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NoReturn

import notices  # beside this script

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"gnu": "manylinux_2_17", "musl": "musllinux_1_2"}  # the oldest that Rust supports
TARGETS = {
    f"{processor}-unknown-linux-{library}": f"{platform}_{processor}"
    for library, platform in LIBRARIES.items()
    for processor in ("x86_64", "aarch64")
}
"""Rust's name of each platform, and that of wheels."""
OWN = f"{platform.machine()}-unknown-linux-gnu"
QUICK = (OWN, next(target for target in reversed(TARGETS) if not target.startswith(platform.machine())))
"""This machine, and the platform that differs from it in processor and C library."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"release: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """End with one line that says what to do."""
    sys.exit(f"release: {text}")


def call(*command: str, env: dict[str, str] | None = None) -> None:
    """Run a command whose output the user sees; its failure ends the release."""
    if subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        fail(f"`{' '.join(command)}` failed")


def can_compile_for(target: str) -> bool:
    """Whether Rust's standard library for this target is here, or rustup can fetch it."""
    folder = Path(notices.output("rustc", "--print", "target-libdir", "--target", target).strip())
    if folder.is_dir():
        return True
    if shutil.which("rustup") is None:
        return False
    say(f"fetching Rust's standard library for {target}")
    subprocess.run(["rustup", "target", "add", target], cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
    return folder.is_dir()


def libraries(wheel: Path) -> list[str]:
    """What auditwheel says that a wheel needs: a platform by its name, or shared libraries."""
    # Looks nowhere: a library of musl may have the name of another file here.
    command = (sys.executable, "-m", "auditwheel", "show", "--ldpaths", "/nowhere", str(wheel))
    shown = " ".join(notices.output(*command).split())
    found = re.search(r'consistent with the following platform tag: "(manylinux\w+)"', shown)
    # auditwheel expects the name that musl has on Alpine. zig writes `libc.so`, which musl itself always is.
    return [found[1]] if found else re.findall(r'"([\w.+-]+)": null', shown)


def audit(wheel: Path, tag: str) -> None:
    """Ends the release unless the wheel keeps what its name promises, and has the papers of its crates."""
    if not wheel.name.startswith("dsl-") or "-cp310-abi3-" not in wheel.name:
        fail(f"{wheel.name} is not for every Python from 3.10 on")
    needs = libraries(wheel)
    if needs != (["libc.so"] if "musl" in tag else [tag]):
        fail(f"{wheel.name} is not for {tag}: it needs {', '.join(needs)}")
    say(f"auditwheel: {', '.join(needs)}")
    call(sys.executable, "-m", "abi3audit", "--strict", "--summary", str(wheel))
    lacking = lacking_papers(wheel)
    if lacking:
        fail(f"{wheel.name} lacks {', '.join(lacking)}")


def lacking_papers(wheel: Path) -> list[str]:
    """What a wheel does not tell about its crates."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition(".dist-info/")[2] for name in archive.namelist()}
        lists = [archive.read(name) for name in archive.namelist() if name.endswith(".cyclonedx.json")]
    crates = {part["name"] for text in lists for part in json.loads(text)["components"]}
    papers = [f"licenses/third-party/{path.name}" for path in (notices.CRATES, notices.LIBRARY)]
    return [name for name in papers if name not in names] + ([] if "ring" in crates else ["a list with ring"])


def build_wheel(target: str, out: Path) -> Path:
    """Build and check the wheel for one platform."""
    tag = TARGETS[target]
    say(f"building the wheel for {tag}: a minute or two")
    before = set(out.glob("*.whl"))
    how = ("--release", "--locked", "--zig", "--compatibility", LIBRARIES[target.rpartition("-")[2]])
    # Apart from other builds of this checkout, which may run at the same time.
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "published"
    env = {**os.environ, "CARGO_TARGET_DIR": str(folder)}
    call("maturin", "build", *how, "--target", target, "--out", str(out), env=env)
    wheels = [path for path in out.glob(f"*{tag}.whl") if path not in before]
    if len(wheels) != 1:
        fail(f"maturin made {len(wheels)} wheels for {tag}: empty {out} and try again")
    audit(wheels[0], tag)
    return wheels[0]


def try_out(wheel: Path) -> None:
    """Install a wheel for this machine into an empty folder and run a job with it."""
    with tempfile.TemporaryDirectory() as folder:
        call(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder,
             str(wheel))  # fmt: skip
        env = {**os.environ, "PYTHONPATH": folder, "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
        call(sys.executable, "-m", "dsl", "--no_python", "true", env=env)
    say(f"{wheel.name} runs a job")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="build and check the wheels and the source archive")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for them (default: dist)")
    quick = f"slower code, and only for {' and '.join(QUICK)}"
    parser.add_argument("--quick", action="store_true", help=quick)
    args = parser.parse_args()
    if args.quick:  # what the checks look at does not depend on it
        os.environ.update(CARGO_PROFILE_RELEASE_LTO="off", CARGO_PROFILE_RELEASE_CODEGEN_UNITS="16")
    out: Path = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("dsl-*"):
        old.unlink()
    say(f"the licences of {notices.write(tuple(TARGETS))} crates are in {notices.FOLDER}")
    for target in QUICK if args.quick else TARGETS:
        if not can_compile_for(target):
            missing = f"Rust's standard library for {target} is missing: run `rustup target add {target}`"
            if target == OWN or not args.quick:
                fail(missing)
            say(f"no wheel for {TARGETS[target]}. {missing}")
            continue
        wheel = build_wheel(target, out)
        if target == OWN:
            try_out(wheel)
    say("building the source archive")
    call("maturin", "sdist", "--out", str(out))
    files = sorted(out.glob("dsl-*"))
    call(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    for path in files:
        say(f"{path.stat().st_size / 1e6:.1f} MB  {path}")


if __name__ == "__main__":
    main()
