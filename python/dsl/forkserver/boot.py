"""Started as a script: ``python [flags] boot.py MODULE,… [script | -m module] FD``.

Imports the server from this file's package, which the interpreter need not have installed. Leaves no trace.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` is made of, which has no stub
import sys

interrupt = _signal.getsignal(_signal.SIGINT)
if interrupt is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # it ends this process without a traceback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

if not getattr(sys.flags, "safe_path", sys.flags.isolated):
    del sys.path[0]


def start(path: str) -> None:
    """Serve, from the package that lies around this file."""
    from _frozen_importlib_external import PathFinder

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
        from dsl.forkserver.server import serve
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

    serve(sys.argv[1:], forget)


sys.path_importer_cache.pop(__file__, None)
start(__file__)
