"""The last collective operation of a worker, from torch's flight recorder.

torch tells it at a unix socket if TORCH_FR_BUFFER_SIZE is above 0, `SOCKET` is in the environment, and the
program runs in `torch.distributed.elastic.control_plane.worker_main`.
"""

from __future__ import annotations

from collections.abc import Mapping

SOCKET = "TORCH_WORKER_SERVER_SOCKET"
"""Variable with the path of the socket."""
ANSWER_S = 1.0
MOST_BYTES = 16 << 20

# Recorders of CPU and of GPU groups.
HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")


def last_collective(path: str) -> Mapping[str, object] | None:
    """The fields of `RankStacks` about it; None: no operation is recorded.

    Raises:
        OSError: the worker does not answer, or another process than one of this user here does.
        ValueError: its answer is not torch's.
    """
    newest: tuple[int, dict[str, object]] | None = None
    for handler in HANDLERS:
        for entry in _entries(path, handler)[-1:]:
            name = str(entry.get("profiling_name", "")).rpartition(":")[2]
            number, made = entry.get("collective_seq_id", 0), entry.get("time_created_ns", 0)
            group = entry.get("process_group") or ("",)
            if name and isinstance(number, int) and isinstance(made, int) and isinstance(group, list):
                fields = {"collective": name, "sequence": max(number, 0), "process_group": str(group[-1])}
                newest = max(newest or (0, {}), (made, fields), key=lambda one: one[0])
    return newest[1] if newest else None


def _entries(path: str, handler: str) -> list[dict[str, object]]:
    import json
    import socket
    from http.client import HTTPConnection, HTTPException

    from dsl.machine.sockets import peer_of

    connection = HTTPConnection("localhost", timeout=ANSWER_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(ANSWER_S)
        connection.sock.connect(path)
        peer_of(connection.sock.fileno())
        connection.request("POST", f"/handler/{handler}")
        found = json.loads(connection.getresponse().read(MOST_BYTES))
    except HTTPException as error:
        raise ValueError(str(error)) from None
    finally:
        connection.close()
    entries = found.get("entries", []) if isinstance(found, dict) else []
    return [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
