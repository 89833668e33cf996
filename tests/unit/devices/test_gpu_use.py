"""Which worker uses which GPU, and how much."""

from __future__ import annotations

from typing import Any

import pytest

from dsl.devices.nvml import NOT_INSTALLED, Gpu, GpuUse, NvmlError, assign

GIB = 1 << 30
QUIET = [Gpu(f"GPU-{index}", 10 * index, index * GIB, ()) for index in range(4)]


def busy(*processes: tuple[tuple[int, int | None], ...]) -> list[Gpu]:
    return [Gpu(f"GPU-{at}", 10 * at, 9 * GIB, found) for at, found in enumerate(processes)]


@pytest.mark.parametrize(
    "gpus, places, expected",
    [
        (busy(((11, GIB),), ((10, 2 * GIB),)), [(0, None), (1, None)], [(10, 2 * GIB), (0, GIB)]),
        (busy(((10, None),), ()), [(0, None), (1, None)], [(0, 9 * GIB), (-1, 0)]),
        (busy(((10, GIB),), ((10, GIB),)), [(0, None), (1, None)], [(10, 2 * GIB), (-1, 0)]),
        (QUIET, [(0, None), (1, None)], [(0, 0), (10, GIB)]),
        (QUIET, [(0, "3"), (1, "2")], [(30, 3 * GIB), (20, 2 * GIB)]),
        (QUIET, [(0, "2,3"), (1, "2,3")], [(20, 2 * GIB), (30, 3 * GIB)]),
        (QUIET, [(0, "GPU-3"), (1, "GPU-9")], [(30, 3 * GIB), (-1, 0)]),
        (QUIET, [(0, ""), (9, None)], [(-1, 0), (-1, 0)]),
        (QUIET, [(0, "7"), (5, "0,1")], [(-1, 0), (-1, 0)]),
    ],
    ids=["by pid", "size unknown", "two GPUs", "by place", "one visible", "list", "uuid", "none", "beyond"],
)
def test_a_worker_has_the_gpu_that_it_uses(
    gpus: list[Gpu], places: list[tuple[int, str | None]], expected: list[tuple[int, int]]
) -> None:
    assert assign(gpus, [10, 11], places) == expected


def test_a_worker_without_a_process_uses_no_gpu() -> None:
    assert assign(QUIET, [0], [(1, None)]) == [(-1, 0)]


class Driver:
    """Two GPUs, of which one does not answer."""

    asked = 0

    def ask(self, question: str, device: str = "", number: int = 0) -> Any:
        self.asked += 1
        if question == "count":
            return 2
        if question == "device" and number == 1:
            raise NvmlError(15, "lost")
        answers = {"device": "0", "processes": [(10, GIB)], "used_bytes": 2 * GIB, "uuid": "GPU-a"}
        if question not in answers:
            raise NvmlError(3, "not supported")
        return answers[question]


def test_what_the_driver_does_not_say_is_unknown() -> None:
    assert GpuUse(Driver).of([10, 11], [(0, None), (1, None)]) == [(-1, GIB), (-1, 0)]


def test_a_driver_that_cannot_be_opened_is_asked_once() -> None:
    opened = []

    def fail() -> Driver:
        opened.append(1)
        raise NvmlError(NOT_INSTALLED, "pynvml is not installed")

    use = GpuUse(fail)
    assert use.of([10], [(0, None)]) == use.of([10], [(0, None)]) == [(-1, 0)]
    assert len(opened) == 1
