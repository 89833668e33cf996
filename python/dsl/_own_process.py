"""Spares a process that is all ours what it needs not. The commands import this first, the library never.

Next to nothing of what is made on the way to the workers is garbage, and looking for some would be a
twentieth of a launch. argparse asks for translations of its words: there are none of it anywhere, and looking
for them takes a millisecond.
"""

from __future__ import annotations

import gc
import gettext

gc.disable()


def _find_nothing(*_args: object, **_options: object) -> list[str]:
    return []


gettext.find = _find_nothing  # type: ignore[assignment]
