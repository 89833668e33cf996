"""The form of messages, heartbeats and output on a connection. Pure.

A frame is 4 bytes of length (big-endian), 1 byte of kind, and the payload. The length is the payload's.
"""

from __future__ import annotations

from struct import Struct, error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    Frame: TypeAlias = tuple[int, bytes]
    """Kind and payload."""

MESSAGE, PING, PONG, OUTPUT, CREDIT = 1, 2, 3, 4, 5
"""Kinds: a message of `dsl.control.messages`; a heartbeat; its answer; output; leave to send more."""

KINDS = frozenset((MESSAGE, PING, PONG, OUTPUT, CREDIT))

LONGEST = 64 << 20
"""Most bytes of payload from a head. The environment of a job fits into it."""

LONGEST_OF_AGENTS = 1 << 20
"""Most bytes of payload from an agent. An agent sends short messages, and there may be many agents."""

LONGEST_OF_STRANGERS = 64 << 10
"""Most bytes of payload before the other side has shown that it knows the key."""


class Damaged(Exception):  # noqa: N818  it says what has happened to the connection
    """Nothing more can be read from a connection; why, in words that follow the name of the other side."""


OUTPUT_COST = 192
"""Bytes that a piece of output counts for in addition to its own: a head needs them to keep the piece."""

_HEAD = Struct(">IB")
_PING = Struct(">QQ")
_PONG = Struct(">QQQQ")
_CREDIT = Struct(">Q")

STDOUT, STDERR = 1, 2
_UNFINISHED = 0x80


def frame(kind: int, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return _HEAD.pack(len(payload), kind) + payload


class Decoder:
    """Takes the bytes of a connection as they come, and gives its frames."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        """Most bytes of payload that a frame may have from now on."""
        self._data = bytearray()

    @property
    def held(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._data)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes, and give each frame that they complete.

        Raises:
            Damaged: the bytes are no frame, or the frame is too long. Nothing can be read after that.
        """
        self._data += data
        at, end = 0, len(self._data)
        try:
            while end - at >= _HEAD.size:
                length, kind = _HEAD.unpack_from(self._data, at)
                if kind not in KINDS:
                    raise Damaged(f"has sent something that is no message (kind {kind})")
                if length > self.longest:
                    raise Damaged(
                        f"has sent a message of {length} bytes, more than the {self.longest} allowed"
                    )
                after = at + _HEAD.size + length
                if after > end:
                    break
                payload = bytes(self._data[at + _HEAD.size : after])
                at = after
                yield kind, payload
        finally:
            del self._data[:at]


def ping(sent_ns: int, real_ns: int) -> bytes:
    """A heartbeat: when it is sent, by a clock that never steps and by the clock of the day."""
    return frame(PING, _PING.pack(sent_ns, real_ns))


def pong(asked: bytes, heard_ns: int, now_ns: int) -> bytes:
    """The answer to the payload of a `ping`, with the times of day of its arrival and of the answer.

    Raises:
        Damaged: the payload is not that of a `ping`.
    """
    sent_ns, real_ns = _unpack(_PING, asked)
    return frame(PONG, _PONG.pack(sent_ns, real_ns, heard_ns, now_ns))


def read_pong(payload: bytes) -> tuple[int, int, int, int]:
    """The arguments of `ping` and `pong`: (sent, real, heard, now), all in nanoseconds.

    Raises:
        Damaged: the payload is not that of a `pong`.
    """
    sent_ns, real_ns, heard_ns, now_ns = _unpack(_PONG, payload)
    return sent_ns, real_ns, heard_ns, now_ns


def output(fd: int, data: bytes, *, unfinished: bool = False) -> bytes:
    """Bytes that workers have written. ``unfinished``: the rest of the last line follows at once."""
    return frame(OUTPUT, bytes((fd | (_UNFINISHED if unfinished else 0),)) + data)


def read_output(payload: bytes) -> tuple[int, bytes, bool]:
    """The arguments of `output`: (1 or 2, bytes, unfinished).

    Raises:
        Damaged: the payload is not that of `output`.
    """
    fd = payload[0] & ~_UNFINISHED if payload else 0
    if fd not in (STDOUT, STDERR):
        raise Damaged("has sent output of a stream that is none")
    return fd, payload[1:], bool(payload[0] & _UNFINISHED)


def credit(count: int) -> bytes:
    """Leave to send ``count`` more bytes of output."""
    return frame(CREDIT, _CREDIT.pack(count))


def read_credit(payload: bytes) -> int:
    """The argument of `credit`.

    Raises:
        Damaged: the payload is not that of a `credit`.
    """
    (count,) = _unpack(_CREDIT, payload)
    return int(count)


def _unpack(shape: Struct, payload: bytes) -> tuple[int, ...]:
    try:
        return shape.unpack(payload)
    except error:
        raise Damaged("has sent a damaged message") from None
