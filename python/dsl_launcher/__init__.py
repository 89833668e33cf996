"""The door to dsl for processes that run dsl alone: no module of the user takes the place of ours there.

Python looks for modules in the working directory and in ``PYTHONPATH`` first, and a user may have a package
`dsl`, or a module with the name of one of Python's. Nobody has a package with the name of this door. From its
import on, Python's own modules come first, and `dsl` comes from the folder beside this one. Other packages,
such as torch, are still those of the user. Workers do not import this.
"""

import os
import sys
from os import path

if sys.argv[0] == "-m" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
    del sys.path[0]  # the working directory
_library = path.dirname(os.__file__)
sys.path.sort(key=lambda one: one not in (_library, path.join(_library, "lib-dynload")))
sys.path.insert(0, path.dirname(__path__[0]))
try:
    import dsl  # noqa: F401  it stays in `sys.modules`
finally:
    del sys.path[0]
