"""The door to dsl for processes that run dsl alone: no module of the user takes the place of ours there.

Python looks for modules in the working directory and in ``PYTHONPATH`` first, and a user may have a package
`dsl`, too. Nobody has one with the name of this door. From its import on, Python looks where the user's
modules are only for what is nowhere else, and `dsl` comes from the folder beside this one. Workers do not
import this.
"""

import sys
from os import environ, path, pathsep

if sys.argv[0] == "-m" and not getattr(sys.flags, "safe_path", sys.flags.isolated):
    del sys.path[0]  # the working directory
if not sys.flags.ignore_environment:
    _users = {path.abspath(one) for one in environ.get("PYTHONPATH", "").split(pathsep)}
    sys.path.sort(key=_users.__contains__)
sys.path.insert(0, path.dirname(__path__[0]))
try:
    import dsl  # noqa: F401  it stays in `sys.modules`
finally:
    del sys.path[0]
