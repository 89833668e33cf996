"""Recording of what the NVIDIA driver of a machine says, and answering with it in tests.

``python -m tests.unit.devices.record_nvml NAME`` on a machine with a GPU writes ``fixtures/nvml/NAME.json``: the
driver's files that `dsl.devices.nvidia` reads, and every question that it asks with its answer or error. The files
whose ``about`` says "written by hand" follow the formats that NVIDIA documents.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsl.devices.nvidia import Nvml, NvmlError, survey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

FOLDER = Path(__file__).parent / "fixtures" / "nvml"
PATTERNS = (
    "proc/driver/nvidia/gpus/*/information",
    "proc/driver/nvidia/capabilities/gpu*/mig/gi*/ci*/access",
    "dev/nvidia*",
    "dev/dxg",
    "sys/bus/pci/devices/*/numa_node",
)


def key(question: str, device: str, number: int) -> str:
    """A question as the recording names it: ``uuid 0``, ``device 3``, ``mig 0 2``."""
    numbers = [str(number)] if question in ("device", "mig") else []
    return " ".join([question, *([device] if device else []), *numbers])


class Recording(Nvml):
    """NVML that remembers what it said."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}

    def __enter__(self) -> Self:
        try:
            super().__enter__()
        except NvmlError as error:
            self.answers["open"] = {"error": [error.code, str(error)]}
            raise
        return self

    def ask(self, question: str, device: str = "", number: int = 0) -> Any:
        name = key(question, device, number)
        try:
            self.answers[name] = super().ask(question, device, number)
        except NvmlError as error:
            self.answers[name] = {"error": [error.code, str(error)]}
            raise
        return self.answers[name]


class Replay:
    """Whoever answers as a recording says; a question that was not asked then is a fault of the test."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def __enter__(self) -> Self:
        if "open" in self.answers:
            raise NvmlError(*self.answers["open"]["error"])
        return self

    def __exit__(self, *_exception: object) -> None:
        return None

    def ask(self, question: str, device: str = "", number: int = 0) -> Any:
        name = key(question, device, number)
        if question == "free_bytes" and name not in self.answers:
            raise NvmlError(3, "Not Supported")  # older recordings know nothing of it
        answer = self.answers[name]
        if isinstance(answer, dict):
            raise NvmlError(*answer["error"])
        return answer


def lay(files: Mapping[str, str], root: Path) -> None:
    """Write recorded files below the root."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


def load(name: str, root: Path) -> Replay:
    """Lay the recorded files below the root, and return who answers for NVML."""
    data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    lay(data["files"], root)
    return Replay(data["nvml"])


def record(name: str, root: Path = Path("/")) -> Path:
    """Write the recording of this machine."""
    recording = Recording()
    found = survey(str(root), lambda: recording)
    addresses = {device.address for device in found.devices}
    files = {}
    for pattern in PATTERNS:
        for path in sorted(root.glob(pattern)):
            if path.name == "numa_node" and path.parent.name not in addresses:
                continue
            is_device = path.relative_to(root).parts[0] == "dev"
            if is_device and path.is_dir():
                continue
            files[str(path.relative_to(root))] = "" if is_device else path.read_text(encoding="utf-8")
    data = {"about": f"recorded: {len(found.devices)} devices", "files": files, "nvml": recording.answers}
    target = FOLDER / f"{name}.json"
    target.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return target


if __name__ == "__main__":
    print(record(sys.argv[1]))
