"""A `Job` as bytes and back: how it travels from the host that planned it to the others.

The bytes are JSON in ASCII: a record is an object whose one key is its class, a tuple a list. Bytes of argv
and environment that are no UTF-8 travel as the surrogates by which Python holds them. Nothing of it can run
code.
"""

from __future__ import annotations

from dsl.errors import JobFormatError
from dsl.model.job import Flavour, Host, Job, MeetingPoint, Program
from dsl.model.request import DebugRequest, OutputRequest, PlacementRequest, SignalRequest, StartRequest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

FORMAT = 1
"""Grows with every change by which one version of dsl cannot read what another has written."""

RECORDS: dict[str, type] = {
    one.__name__: one
    for one in (
        Job,
        Flavour,
        Program,
        MeetingPoint,
        Host,
        SignalRequest,
        OutputRequest,
        PlacementRequest,
        StartRequest,
        DebugRequest,
    )
}


def job_to_bytes(job: Job) -> bytes:
    """Write a job. The reverse is `job_from_bytes`."""
    from json import dumps

    text = dumps({"format": FORMAT, "job": to_plain(job, RECORDS)}, separators=(",", ":"))
    return text.encode("ascii")


def job_from_bytes(data: bytes) -> Job:
    """Read a job that `job_to_bytes` wrote.

    Raises:
        JobFormatError: these are not the bytes of a job, or another version has written them.
    """
    from json import loads

    try:
        found = loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        raise JobFormatError("the description of the job is damaged: it is not JSON") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        theirs = found.get("format") if isinstance(found, dict) else None
        raise JobFormatError(
            f"the description of the job has format {theirs!r}, expected {FORMAT}: "
            "install the same version of dsl on every host"
        )
    job = from_plain(found.get("job"), RECORDS)
    if not isinstance(job, Job):
        raise JobFormatError("the description of the job is damaged: there is no job in it")
    return job


def to_plain(value: Any, records: Mapping[str, type]) -> Any:
    """A value as JSON can hold it. ``records``: the classes that it may be made of, by name."""
    if isinstance(value, tuple):
        return [to_plain(item, records) for item in value]
    name = type(value).__name__
    if name in records:
        return {name: {field: to_plain(getattr(value, field), records) for field in value.__match_args__}}
    return value


def from_plain(value: Any, records: Mapping[str, type]) -> Any:
    """The reverse of `to_plain`.

    Raises:
        JobFormatError: a part is none of ``records``, or has other fields.
    """
    if isinstance(value, list):
        return tuple([from_plain(item, records) for item in value])
    if not isinstance(value, dict):
        return value
    name, fields = next(iter(value.items()), ("", None))
    if len(value) != 1 or name not in records or not isinstance(fields, dict):
        raise JobFormatError(f"the description of the job is damaged: {name!r:.40} is none of its parts")
    try:
        return records[name](**{field: from_plain(inner, records) for field, inner in fields.items()})
    except TypeError as error:
        raise JobFormatError(f"the description of the job is damaged: {error}") from None
