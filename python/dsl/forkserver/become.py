"""Turns a forked child into a worker that runs as in a Python of its own."""

from __future__ import annotations

import os
import posix
import sys

from dsl._core import ForkedProgram
from dsl.forkserver.ending import flush_streams, line_buffering, reopen_streams
from dsl.forkserver.hidden import namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Sequence
    from types import CodeType, TracebackType
    from typing import Any, NoReturn

    from dsl._core import ForkOrder
    from dsl.forkserver.ending import Preloaded

    Variable = tuple[bytes, bytes | None, bytes | None, bytes | None]
    Holders = list[tuple[dict[str, Any], str]]
    Compiled = tuple[str, bytes, CodeType]
else:
    import _signal


IMPORT_S = 600
"""Seconds that imports may take: SIGALRM ends a server that takes longer."""

# By this interval we recognize our timer. It has no other effect: the first SIGALRM ends the server.
_INTERVAL_S = 1234.567891
_CWD = "/proc/self/cwd"


class LeaveServer(BaseException):
    """Raised to take a worker out of all frames of the server, up to the interpreter."""


def show_program(program: Sequence[str]) -> str | None:
    """Let all later imports see a program's main module, arguments and folder.

    ``program``: ``(script, …)``, ``("-m", module, …)``, or nothing. Returns the object in `sys.path` that is
    the program's folder; None if the interpreter's flags leave that folder out.
    """
    _renew_main(_holders_of_main(), is_ours=True)
    _show_file(program)
    if getattr(sys.flags, "safe_path", sys.flags.isolated):
        return None
    # A new string object, by whose identity we find it again.
    folder = os.fsdecode(os.fsencode(_folder(program)))
    sys.path.insert(0, folder)
    return folder


class ImportChanges:
    """What imports change in a process, beside its memory. Made before the imports: it starts their timer."""

    def __init__(self) -> None:
        _signal.setitimer(_signal.ITIMER_REAL, IMPORT_S, _INTERVAL_S)
        self._interval_s = _signal.getitimer(_signal.ITIMER_REAL)[1]
        self._argv = sys.argv
        self._words = list(sys.argv)
        self._cwd = os.readlink(_CWD)
        self._mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
        self._by_line = line_buffering()

    def settle(self, environ: Sequence[bytes]) -> str | None:
        """Note what has changed since. Return a clause if workers cannot have such a change; else None.

        ``environ``: the environment as C libraries see it.
        """
        left_s, interval_s = _signal.setitimer(_signal.ITIMER_REAL, 0)
        others = (_signal.getitimer(_signal.ITIMER_VIRTUAL), _signal.getitimer(_signal.ITIMER_PROF))
        if (left_s and interval_s != self._interval_s) or any(map(any, others)):
            return "what was imported has set a timer: no worker has it"
        if sys.argv is not self._argv or sys.argv != self._words:
            return "what was imported changes sys.argv, which holds no arguments of a worker"
        cwd = os.readlink(_CWD)
        self.cwd = None if cwd == self._cwd else cwd
        if self.cwd is not None and not _leads_here(self.cwd):
            return "what was imported has removed the working directory"
        mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
        self.blocked, self.unblocked = mask - self._mask, self._mask - mask
        self.by_line = dict(set(line_buffering().items()) - set(self._by_line.items()))
        self.variables = _changed_variables(environ)
        self.holders = _holders_of_main()
        # Found once here: a worker that looked through the cache would touch, and so copy, all that it holds.
        self.absent = tuple([path for path, finder in sys.path_importer_cache.items() if finder is None])
        return None


def _leads_here(folder: str) -> bool:
    try:
        return os.path.samestat(os.stat(folder), os.stat("."))
    except OSError:
        return False


def _changed_variables(environ: Sequence[bytes]) -> list[Variable]:
    """Variables that have changed since this process started.

    Each has its name, its first value, Python's value and C's value; None: not set. The interpreter sets
    LC_CTYPE when it begins (PEP 538), modules set variables that their libraries read, and C libraries set
    variables without Python.
    """
    with open("/proc/self/environ", "rb") as file:
        given = _variables(file.read().split(b"\0"))
    in_c = _variables(environ)
    names = dict.fromkeys((*given, *posix.environ, *in_c))
    all_of_them = [(name, given.get(name), posix.environ.get(name), in_c.get(name)) for name in names]
    # An entry without a name is no change by imports.
    return [one for one in all_of_them if one[0] and not one[1] == one[2] == one[3]]


def _holders_of_main() -> Holders:
    """All places that hold the main module, as (namespace, name): `sys.modules`, and names in modules."""
    main = sys.modules["__main__"]
    spaces = [sys.modules, *namespaces().values()]
    return [(space, name) for space in spaces for name, value in list(space.items()) if value is main]


def compile_program(program: Sequence[str], preloaded: Preloaded) -> Compiled | None:
    """A script's path, text and code, for workers that find the same text; None if they must compile it.

    They must if the compiler warns of something: each worker shows the warning itself.
    """
    # We do not import this module: it would stay in the workers.
    warnings = preloaded.modules.get("warnings")
    if warnings is None:
        return None
    with warnings.catch_warnings(module=warnings):
        warnings.simplefilter("error")
        return _compiled(program)


def become_worker(
    order: ForkOrder,
    folder: str | None,
    imports: ImportChanges,
    preloaded: Preloaded,
    compiled: Compiled | None,
) -> NoReturn:
    """Carry out an order in a forked child. This raises `LeaveServer`, which no code may catch.

    ``folder`` is what `show_program` has returned, ``imports`` are settled, ``preloaded`` are noted,
    ``compiled`` is what `compile_program` has returned. If `compile` cannot take a script (a folder, an
    archive, a text with an error), the worker's command is executed instead.
    """
    _take_randomness(preloaded)
    order.enter()
    order.show_command(len(sys.orig_argv))
    posix.environ.clear()
    posix.environ.update(_variables(order.environ))
    words = [os.fsdecode(word) for word in order.argv]
    program = tuple(words[order.entry :])
    is_module = len(program) > 1 and program[0] == "-m"
    script = None if is_module else _compiled(program, compiled)
    if script is None and not is_module:  # only the interpreter can run it, or report its error
        os.execvp(order.argv[0], order.argv)  # noqa: S606  no shell is what we want
    _change_environment(imports.variables)
    # `gc.freeze` keeps the server's main module from being collected, with all that a program puts into it.
    _renew_main(imports.holders, is_ours=False)
    for path in imports.absent:
        if os.path.exists(path):  # it has appeared since the server looked for it
            sys.path_importer_cache.pop(path, None)
    _show_file(program)
    sys.orig_argv[:] = words
    for place, entry in enumerate(sys.path):
        if folder is not None and entry is folder:
            sys.path[place] = _folder(program)
            break
    if imports.cwd is not None:
        os.chdir(imports.cwd)
    _signal.set_wakeup_fd(-1)
    interrupt = _take_trace(order)
    _signal.pthread_sigmask(_signal.SIG_BLOCK, imports.blocked)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, imports.unblocked)
    reopen_streams(imports.by_line)
    preloaded.enter(order)
    _leave(program, script[2] if script else None, interrupt, preloaded)


def _take_trace(order: ForkOrder) -> Any:
    """Take over what imports have left, and return the program's handler of SIGINT.

    Until the program begins, SIGINT ends this process without a traceback of ours, as if it were just being
    executed.
    """
    interrupt = _signal.getsignal(_signal.SIGINT)
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGINT})
    order.take_trace()
    if order.ignores_quit and _signal.getsignal(_signal.SIGQUIT) is _signal.SIG_DFL:
        _signal.signal(_signal.SIGQUIT, _signal.SIG_IGN)  # so that Python knows it, too
    if interrupt is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
    return interrupt


def _compiled(program: Sequence[str], known: Compiled | None = None) -> Compiled | None:
    """The script's path, text and code; None if it cannot be read or compiled."""
    if not program or program[0].startswith("-"):
        return None
    try:
        path = _absolute(program[0])
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            text = file.read()
        if known is not None and known[:2] == (path, text):
            return known
        return path, text, compile(text, path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, OverflowError, RecursionError, MemoryError, Warning):
        return None


def _absolute(path: str) -> str:
    """An absolute path as the interpreter makes it, which keeps ``.`` and ``..``."""
    return path if path.startswith("/") else f"{os.getcwd()}/{path}"


def _variables(entries: Sequence[bytes]) -> dict[bytes, bytes]:
    """Variables as the interpreter reads them: the first entry of each name, none without a ``=``."""
    found: dict[bytes, bytes] = {}
    for entry in entries:
        name, equals, value = entry.partition(b"=")
        if equals:
            found.setdefault(name, value)
    return found


def _change_environment(variables: Sequence[Variable]) -> None:
    """Repeat what the imports did to each variable whose first value was the same here as in the server."""
    for name, before, now, in_c in variables:
        if posix.environ.get(name) != before:
            continue
        if now is not None:
            posix.environ[name] = now
        else:
            posix.environ.pop(name, None)
        if in_c is not None:
            posix.putenv(name, in_c)
        elif before is not None:
            posix.unsetenv(name)


def _renew_main(holders: Holders, *, is_ours: bool) -> None:
    """Put a new main module in place, as it is before a program begins.

    ``is_ours``: the old module is ours, so only special names such as ``__name__`` are kept.
    """
    old = sys.modules["__main__"]
    new = type(old)("__main__")
    for name, value in vars(old).items():
        if not is_ours or (name.startswith("__") and name.endswith("__")):
            vars(new)[name] = {} if name == "__annotations__" else value
    vars(new)["__doc__"] = None
    for space, name in holders:
        space[name] = new


def _show_file(program: Sequence[str]) -> None:
    main = vars(sys.modules["__main__"])
    if program and program[0] != "-m":
        path = _absolute(program[0])
        main["__file__"] = path
        main["__loader__"] = sys.modules["_frozen_importlib_external"].SourceFileLoader("__main__", path)
        sys.argv[:] = program
        # An interpreter leaves this entry when it asks whether the script is an archive.
        sys.path_importer_cache[path] = None
        return
    main.pop("__file__", None)
    main.pop("__cached__", None)
    main["__loader__"] = sys.modules["_frozen_importlib"].BuiltinImporter
    # `-m` leaves this here, and `runpy` corrects it later.
    sys.argv[:] = ["-m", *program[2:]]


def _folder(program: Sequence[str]) -> str:
    if not program or program[0] == "-m":
        return os.getcwd()
    return os.path.dirname(os.path.realpath(program[0]))


def _take_randomness(preloaded: Preloaded) -> None:
    """Give generators of random numbers new seeds. `random` does so by itself."""
    modules: dict[str, Any] = preloaded.modules
    if (random := modules.get("numpy.random")) is not None:
        # As good as its `seed`, in a third of the time: 624 random words, all marked as used, no draw kept.
        words = modules["numpy"].frombuffer(os.urandom(4 * 624), "u4")
        random.set_state(("MT19937", words, 624, 0, 0.0))
    if (torch := modules.get("torch")) is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()
    # datasets names files of a cache by it, and other workers may write such files at the same time.
    if (names := modules.get("datasets.fingerprint")) is not None and "fingerprint_rng" in vars(names):
        names.fingerprint_rng.seed()
    if (process := modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    if (threading := modules.get("threading")) is not None:
        threading.main_thread()._set_native_id()  # noqa: SLF001  3.10 to 3.12 leave the server's there


def _leave(program: tuple[str, ...], code: CodeType | None, interrupt: Any, preloaded: Preloaded) -> NoReturn:
    """Leave the server's frames and run the program. ``interrupt``: the program's handler of SIGINT."""
    hook = sys.excepthook
    function: Any = type(_leave)
    is_script = code is not None

    def prepare(
        _kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> tuple[Callable[..., object], tuple[Any, ...]]:
        sys.excepthook = hook
        for name in ("last_exc", "last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        value.__traceback__ = None
        while trace is not None:
            trace.tb_frame.clear()
            trace = trace.tb_next
        if is_script:
            start: tuple[Any, tuple[Any, ...]] = function(code, vars(sys.modules["__main__"])), ()
        else:
            import runpy

            # What `-m` itself calls.
            start = vars(runpy)["_run_module_as_main"], (program[1], True)
        if interrupt is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, interrupt)
        return start

    def settle(code: int | None) -> None:
        if is_script:
            flush_streams()
        preloaded.exit_code = code
        if code is None:
            _note_interrupt()

    def finish() -> None:
        if is_script:
            for name in ("__file__", "__cached__"):
                vars(sys.modules["__main__"]).pop(name, None)

    sys.excepthook = ForkedProgram(prepare, settle, finish)
    raise LeaveServer


def _note_interrupt() -> None:
    """Let the interpreter end by SIGINT: it does if code from a text, not a function, raises this error."""
    try:
        exec("raise KeyboardInterrupt", {})  # noqa: S102  a text of ours
    except KeyboardInterrupt:
        return
