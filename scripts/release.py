"""Build what is published, and check it: a wheel for each processor, and the source archive.

    release.py [--out FOLDER]

zig links the wheels for an old glibc, so that they run on every distribution of the last ten years.
auditwheel and abi3audit judge each. The one for this machine is installed into an empty folder, and runs a
job.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
PROCESSORS = ("x86_64", "aarch64")
GLIBC = (2, 17)  # the oldest that Rust supports
PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}"


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


def output(*command: str) -> str:
    """What a command prints; its failure ends the release."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        fail(f"`{' '.join(command)}` failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def can_compile_for(target: str) -> bool:
    """Whether Rust's standard library for this target is here, or rustup can fetch it."""
    folder = Path(output("rustc", "--print", "target-libdir", "--target", target).strip())
    if folder.is_dir():
        return True
    if shutil.which("rustup") is None:
        return False
    say(f"fetching Rust's standard library for {target}")
    subprocess.run(["rustup", "target", "add", target], cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
    return folder.is_dir()


def audit(wheel: Path, processor: str) -> None:
    """Ends the release unless the wheel keeps what its name promises."""
    if not wheel.name.startswith("dsl-") or "-cp310-abi3-" not in wheel.name:
        fail(f"{wheel.name} is not for every Python from 3.10 on")
    wanted = f"{PLATFORM}_{processor}"
    shown = " ".join(output(sys.executable, "-m", "auditwheel", "show", str(wheel)).split())
    found = re.search(r'consistent with the following platform tag: "(\w+)"', shown)
    if found is None or found[1] != wanted:
        fail(f"{wheel.name} is not for {wanted}: {shown}")
    say(f"auditwheel: {found[1]}")
    call(sys.executable, "-m", "abi3audit", "--strict", "--summary", str(wheel))


def build_wheel(processor: str, out: Path) -> Path:
    """Build and check the wheel for one kind of processor."""
    target = f"{processor}-unknown-linux-gnu"
    say(f"building the wheel for {processor}: a minute or two")
    before = set(out.glob("*.whl"))
    how = ("--release", "--locked", "--zig", "--compatibility", PLATFORM)
    # Apart from other builds of this checkout, which may run at the same time.
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "published"
    env = {**os.environ, "CARGO_TARGET_DIR": str(folder)}
    call("maturin", "build", *how, "--target", target, "--out", str(out), env=env)
    wheels = [path for path in out.glob(f"*_{processor}.whl") if path not in before]
    if len(wheels) != 1:
        fail(f"maturin made {len(wheels)} wheels for {processor}: empty {out} and try again")
    audit(wheels[0], processor)
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
    out: Path = parser.parse_args().out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("dsl-*"):
        old.unlink()
    for processor in PROCESSORS:
        is_own = processor == platform.machine()
        target = f"{processor}-unknown-linux-gnu"
        if not can_compile_for(target):
            missing = (
                f"Rust's standard library for {target} is not here: `rustup target add {target}` fetches it"
            )
            if is_own:
                fail(missing)
            say(f"no wheel for {processor}, {missing}")
            continue
        wheel = build_wheel(processor, out)
        if is_own:
            try_out(wheel)
    say("building the source archive")
    call("maturin", "sdist", "--out", str(out))
    for path in sorted(out.glob("dsl-*")):
        say(f"{path.stat().st_size / 1e6:.1f} MB  {path}")


if __name__ == "__main__":
    main()
