"""Starts a fork server, as the script ``python [flags] boot.py MODULE,… [script | -m module] FD``.

Imports the server from this file's package, which the interpreter need not have installed. Leaves no trace,
not even ``__future__``, which would stay in the workers as a module that they have not imported.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

    from dsl.model.job import ForkServer

# Empty words at the end. C libraries that set the title of a process look in a worker's memory for as many
# words as the server was started with. They find that many if the worker itself has no more words.
_ROOM = ("",) * 60


def words_of(server: "ForkServer", withheld: "Sequence[str] | None" = None) -> "tuple[str, ...]":
    """Command line of a fork server, to which the engine adds the number of its descriptor.

    A warm server has the names of variables that it does not get, ``withheld``, and further words behind
    them: folder and name of its socket, and the word with `sockets.MARK`.
    """
    import dsl

    program = ("-m", server.script) if server.is_module else (server.script,)
    boot = f"{dsl.__path__[0]}/forkserver/boot.py"  # of the package that has the extension
    listed = ",".join(server.preload)
    words = (*server.interpreter, boot, listed, *(program if server.script else ()), *_ROOM)
    return words if withheld is None else (*words, ",".join(withheld))


def start(path: str) -> None:
    """Serve, from the package that lies around this file."""
    import _signal  # type: ignore[import-not-found]  # what `signal` is made of, which has no stub
    from _frozen_importlib_external import PathFinder

    interrupt = _signal.getsignal(_signal.SIGINT)
    if interrupt is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # it ends this process without a traceback
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        del sys.path[0]
    sys.path_importer_cache.pop(path, None)
    folder = path.rpartition("/")[0].rpartition("/")[0].rpartition("/")[0] or "/"

    class Finder:
        """Finds only this package. The package's own path finds its modules."""

        @staticmethod
        def find_spec(name: str, _path: object = None, _target: object = None) -> "ModuleSpec | None":
            return PathFinder.find_spec(name, [folder]) if name == "dsl" else None

    before = set(sys.modules)
    caches = set(sys.path_importer_cache)
    sys.meta_path.insert(0, Finder)
    try:
        from dsl.forkserver.server import serve, serve_warm
    except ImportError as error:
        # For example a Python without the global lock, or a Python that is too old.
        raise SystemExit(f"this Python cannot load the extension of dsl: {error}") from None

    def forget() -> None:
        sys.meta_path.remove(Finder)
        for name in set(sys.modules) - before:
            # The interpreter keeps the codecs that it has looked up, and imports no module for them again.
            if not name.startswith("encodings."):
                del sys.modules[name]
        for name in set(sys.path_importer_cache) - caches:
            del sys.path_importer_cache[name]
        if interrupt is _signal.default_int_handler:
            _signal.signal(_signal.SIGINT, interrupt)

    (serve if sys.argv[-1].isdecimal() else serve_warm)(sys.argv[1:], forget)


if __name__ == "__main__":
    start(__file__)
