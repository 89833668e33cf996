"""One host: its life, what runs on it, and how to run something on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit import processes
from tests.kit.cluster.site import BOOT_S, PATH, Site, answer
from tests.kit.waiting import until

NAMESPACES = ("net", "uts", "mount", "pid", "ipc")


class Running(NamedTuple):
    """A process of a host."""

    pid: int
    """As the host itself counts."""
    start: int
    """Clock ticks; with `pid`, its identity."""
    name: str
    command: str


class HostProcess(subprocess.Popen[Any]):
    """A process on a host. It leads a session of its own there; signals go to it, not to what carries it.

    `pid` is that of the carrier (nsenter), which ends as the process ends: with its code, or by its signal.
    """

    @property
    def child(self) -> int:
        """Pid of the process itself, as the machine counts; a session and a group have the same number."""
        found = until(self._find, 30)
        assert found > 0, f"{self.args!r} has ended"
        return found

    def _find(self) -> int:
        if self.poll() is not None:
            return -1
        for pid in processes.children(self.pid):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == pid:
                    return pid
        return 0

    def send_signal(self, sig: int) -> None:
        self._send(os.kill, sig)

    def send_group(self, sig: int) -> None:
        """To its process group, as a terminal does."""
        self._send(os.killpg, sig)

    def _send(self, send: Any, sig: int) -> None:
        pid = until(self._find, 30)
        if pid > 0:
            with contextlib.suppress(ProcessLookupError):
                send(pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Host:
    """A host of a cluster, up or down."""

    def __init__(self, site: Site, index: int, name: str, address: str) -> None:
        self.site = site
        self.index = index
        self.name = name
        self.address = address
        self.cgroup: Path | None = None
        """What all its processes live in, where the machine has cgroups v2 that can be written."""
        self._init: subprocess.Popen[str] | None = None
        self._pid = 0
        self._own: set[tuple[int, int]] = set()
        self.daemons: set[str] = set()
        """Names of programs that may run on it whenever they were started."""
        self.is_plugged = True
        self.listeners: list[Callable[[Host], None]] = []
        """Called after each boot but the first: they start its further daemons again."""

    def __repr__(self) -> str:
        return self.name

    @property
    def is_up(self) -> bool:
        """True between boot and crash."""
        return self._init is not None and self._init.poll() is None

    @property
    def pid(self) -> int:
        """Pid of its pid 1, as the machine counts."""
        assert self.is_up, f"{self.name} is down"
        return self._pid

    @property
    def carrier(self) -> int | None:
        """Pid of our child that carries the host; None while there is none."""
        return None if self._init is None else self._init.pid

    @property
    def root(self) -> Path:
        """Its file system, seen from the machine: `host.root / "etc/hosts"`."""
        return Path(f"/proc/{self.pid}/root")

    # Life. A boot has two halves, so that all hosts of a cluster boot at once.

    def begin(self) -> None:
        """The first half of a boot."""
        assert not self.is_up, f"{self.name} is up"
        folder = self.site.state / self.name
        folder.mkdir(exist_ok=True)
        with (folder / "init.log").open("a", encoding="utf-8") as log:
            namespaces = [f"--{kind}" for kind in NAMESPACES]
            program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("init.py"))]
            self._init = subprocess.Popen(
                ["unshare", *namespaces, "--fork", "--kill-child", "--", *program],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd="/", env={"PATH": PATH}, start_new_session=True,
                preexec_fn=self._enter_cgroup(),  # noqa: PLW1509 - two system calls, without any lock
            )  # fmt: skip
        settings = {
            "name": self.name,
            "address": self.address,
            "state": str(self.site.state),
            "packages": str(self.site.packages),
        }
        self._tell(settings)

    def finish(self) -> None:
        """The second half: its cable, and its daemons."""
        assert self._init is not None
        self._hear("born")
        (self._pid,) = processes.children(self._init.pid)
        self._hear("built")
        self.site.plug_in(self.index, self._pid)
        self.is_plugged = True
        self._tell("the cable is in")

    def settle(self) -> None:
        """Wait until it is up. What runs then is its own."""
        self._hear("up")
        self._adopt()

    def boot(self) -> None:
        """Start it (again): same name, address, keys and logs; new processes, and a new /etc."""
        self.begin()
        self.finish()
        self.settle()
        for listener in self.listeners:
            listener(self)

    def _adopt(self) -> None:
        """Count what runs now as the host's own."""
        self._own = {(one.pid, one.start) for one in self.processes()}

    def crash(self) -> None:
        """Kill all its processes in one instant; their peers see connections that end."""
        if self._init is None:
            return
        if self._init.poll() is None:
            os.kill(self._pid or self._init.pid, signal.SIGKILL)
        self._init.wait(BOOT_S)  # the kernel has ended every process of the host by then
        for pipe in (self._init.stdin, self._init.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._init = None
        self._pid = 0
        self._own = set()

    def unplug(self) -> None:
        """Pull its cable; peers see silence."""
        self.site.switch(f"link set p{self.index} down")
        self.is_plugged = False

    def plug(self) -> None:
        self.site.switch(f"link set p{self.index} up")
        self.is_plugged = True

    def poweroff(self) -> None:
        """Pull its cable, then kill everything; peers see silence for ever."""
        self.unplug()
        self.crash()

    # What runs on it.

    def processes(self) -> list[Running]:
        """Every living process of it; none while it is down."""
        if not self.is_up:
            return []
        proc = f"{self.root}/proc"
        found = []
        for name in os.listdir(proc):
            if name.isdigit() and (process := processes.find(int(name), proc)) and process.state not in "ZX":
                words = _read(f"{proc}/{name}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
                found.append(Running(process.pid, process.start, process.name, words or f"[{process.name}]"))
        return found

    def strangers(self) -> list[Running]:
        """Its processes beyond its own daemons: what a test has left behind, once the test is over."""
        return [
            one
            for one in self.processes()
            if (one.pid, one.start) not in self._own and one.name not in self.daemons
        ]

    def freeze(self) -> None:
        """Stop every process of it, as a host that hangs; the kernel still answers for it."""
        self._set_frozen("1")

    def thaw(self) -> None:
        self._set_frozen("0")

    def _set_frozen(self, value: str) -> None:
        assert self.cgroup is not None, "needs cgroups v2"
        file = os.open(self.cgroup / "cgroup.freeze", os.O_WRONLY)
        try:
            os.write(file, value.encode())
        finally:
            os.close(file)

    # How to run something on it.

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a login of root has there, and `env` above it."""
        return {
            "HOME": str(self.site.home),
            "USER": "root",
            "LOGNAME": "root",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TMPDIR": "/run/tmp",
            "PATH": PATH,
            **(env or {}),
        }

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        has_terminal: bool = False,
        **options: Any,
    ) -> HostProcess:
        """Start a command there.

        `env` comes above `environment()`; nothing of our own environment is passed. `cwd`: as the host sees
        it, root's home unless given. `has_terminal`: stdin is a terminal that it shall control. `options` are
        those of Popen.
        """
        session = ["/usr/bin/setsid", "--ctty"] if has_terminal else ["/usr/bin/setsid"]
        into = [f"--{kind}" for kind in NAMESPACES]
        where = f"--wdns={cwd or self.site.home}"
        return HostProcess(
            ["/usr/bin/nsenter", f"--target={self.pid}", *into, where, "--", *session, *map(str, command)],
            env=self.environment(env),
            preexec_fn=self._enter_cgroup(),
            **options,
        )  # fmt: skip

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_s: float = 60.0,
        check: bool = False,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end; its output is text.

        Raises:
            subprocess.TimeoutExpired: it was killed, because it took longer.
            AssertionError: with `check`, it has not ended with 0.
        """
        for stream in ("stdout", "stderr"):
            options.setdefault(stream, subprocess.PIPE)
        if "input" not in options:
            options.setdefault("stdin", subprocess.DEVNULL)
        text = options.pop("input", None)
        if text is not None:
            options["stdin"] = subprocess.PIPE
        process = self.start(command, env=env, cwd=cwd, text=True, errors="surrogateescape", **options)
        with process:
            try:
                out, err = process.communicate(text, timeout_s)
            except BaseException:
                process.kill()
                raise
        words = " ".join(map(str, command))
        if check:
            assert process.returncode == 0, f"{self.name}: {words}: {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    # Inside.

    def _enter_cgroup(self) -> Any:
        """What the child does before its exec, so that it is born in the host's cgroup."""
        if self.cgroup is None:
            return None
        path = str(self.cgroup / "cgroup.procs")

        def enter() -> None:
            file = os.open(path, os.O_WRONLY)
            os.write(file, b"0")
            os.close(file)

        return enter

    def _tell(self, message: object) -> None:
        assert self._init is not None
        assert self._init.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its last words are in the log
            self._init.stdin.write(json.dumps(message) + "\n")
            self._init.stdin.flush()

    def _hear(self, word: str) -> None:
        """Wait for that word of pid 1."""
        assert self._init is not None
        assert self._init.stdout is not None
        line = answer(self._init.stdout)
        if line != word:
            log = (self.site.state / self.name / "init.log").read_text(encoding="utf-8", errors="replace")
            self.crash()
            raise AssertionError(f"{self.name} did not come up ({line!r} instead of {word!r}): {log.strip()}")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # it has ended
        return b""
