"""Where a server's later objects lie: a worker copies each page of the server that it writes to."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Of Python's allocator: the largest size that it takes from a pool, the step between sizes, bytes of a pool.
_LARGEST, _STEP, _POOL = 512, 16, 1 << 14
# It fills no more: the interpreter may use another allocator.
_MOST_BYTES = 16 << 20


def fill_holes() -> list[object]:
    """Occupy free places between objects, as imports leave them. Returns what occupies them.

    Later objects lie side by side, so a worker that writes to them copies few pages.
    """
    kept: list[object] = []
    filled = 0
    for size in range(_STEP, _LARGEST + 1, _STEP):
        make, count = _maker(size), _POOL // size
        while filled < _MOST_BYTES:
            made = [make() for _ in range(count)]
            kept += made
            filled += count * size
            if _are_side_by_side([id(one) for one in made], size):
                break
    return kept


def _are_side_by_side(places: list[int], size: int) -> bool:
    """Whether most blocks lie behind the block before, perhaps with another block between them."""
    before, steps = places[0], 0
    for place in places:
        steps += 0 < place - before <= 2 * size
        before = place
    return steps > len(places) * 3 // 4


def _maker(size: int) -> Callable[[], object]:
    """What makes an object of this size."""
    rest = size - sys.getsizeof(b"")
    if rest >= 0:
        return lambda: bytes(rest)
    return object if size == _STEP else lambda: complex(size)
