"""The encrypted session of two hosts, as Python sees it: `rust/control` tests the protocol."""

from __future__ import annotations

import pytest

from dsl._core import SecureError, SecureSession

KEY = bytes(range(32))


def pair(key: bytes = KEY, other_key: bytes = KEY) -> tuple[SecureSession, SecureSession]:
    one, other = SecureSession(key, initiator=True), SecureSession(other_key, initiator=False)
    other.read_handshake(one.handshake())
    one.read_handshake(other.handshake())
    return one, other


def test_both_sides_are_ready_after_one_message_each() -> None:
    one, other = SecureSession(KEY, initiator=True), SecureSession(KEY, initiator=False)
    first = one.handshake()
    assert len(first) == 48
    assert [one.is_ready, other.is_ready] == [False, False]
    other.read_handshake(first)
    one.read_handshake(other.handshake())
    assert [one.is_ready, other.is_ready] == [True, True]
    assert other.open(one.seal(b"order")) == b"order"
    assert one.open(other.seal(b"answer")) == b"answer"


def test_a_mebibyte_goes_in_pieces_both_ways() -> None:
    one, other = pair()
    data = bytes(range(256)) * 4096
    step = SecureSession.MAX_PLAIN
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    assert b"".join(other.open(one.seal(piece)) for piece in pieces) == data
    assert b"".join(one.open(message) for message in [other.seal(piece) for piece in pieces]) == data


def test_a_message_holds_so_much_and_no_more() -> None:
    one, other = pair()
    most = bytes(SecureSession.MAX_PLAIN)
    with pytest.raises(SecureError, match="65519 bytes at most, not 65520"):
        one.seal(most + b"x")
    message = one.seal(most)
    assert len(message) == len(most) + 16
    assert other.open(message) == most
    assert other.open(one.seal(b"")) == b""


def test_a_stranger_with_another_key_is_refused() -> None:
    with pytest.raises(SecureError, match="another key"):
        pair(other_key=bytes(32))


@pytest.mark.parametrize("length", [0, 31, 33, 64])
def test_a_key_has_thirty_two_bytes(length: int) -> None:
    with pytest.raises(SecureError, match=f"a key has 32 bytes, not {length}"):
        SecureSession(bytes(length), initiator=True)


def test_calls_out_of_order_fail_and_change_nothing() -> None:
    one, other = SecureSession(KEY, initiator=True), SecureSession(KEY, initiator=False)
    with pytest.raises(SecureError, match="other side's turn"):
        other.handshake()
    with pytest.raises(SecureError, match="this side's turn"):
        one.read_handshake(bytes(48))
    with pytest.raises(SecureError, match="not over"):
        one.seal(b"early")
    with pytest.raises(SecureError, match="not over"):
        one.open(bytes(16))
    other.read_handshake(one.handshake())
    one.read_handshake(other.handshake())
    with pytest.raises(SecureError, match="handshake is over"):
        one.handshake()
    assert other.open(one.seal(b"order")) == b"order"


def flipped(message: bytes) -> bytes:
    return bytes([message[0] ^ 1]) + message[1:]


@pytest.mark.parametrize(
    "damage", [flipped, lambda message: message[:-1], lambda message: message + b"x", lambda _: b""]
)
def test_a_damaged_message_ends_the_session(damage: object) -> None:
    assert callable(damage)
    one, other = pair()
    with pytest.raises(SecureError, match="damaged"):
        other.open(damage(one.seal(b"order")))
    assert not other.is_ready
    with pytest.raises(SecureError, match="earlier error"):
        other.open(one.seal(b"next"))


def test_a_repeated_message_is_refused() -> None:
    one, other = pair()
    message = one.seal(b"order")
    assert other.open(message) == b"order"
    with pytest.raises(SecureError, match="repeated"):
        other.open(message)


def test_messages_in_another_order_are_refused() -> None:
    one, other = pair()
    _first, second = one.seal(b"first"), one.seal(b"second")
    with pytest.raises(SecureError, match="reordered"):
        other.open(second)


def test_a_message_of_its_own_is_refused() -> None:
    one, _ = pair()
    with pytest.raises(SecureError, match="somebody else"):
        one.open(one.seal(b"order"))


def test_a_damaged_handshake_is_refused() -> None:
    one, other = SecureSession(KEY, initiator=True), SecureSession(KEY, initiator=False)
    with pytest.raises(SecureError, match="damaged on the way"):
        other.read_handshake(flipped(one.handshake()))
    with pytest.raises(SecureError, match="earlier error"):
        other.handshake()


def test_a_session_does_not_show_its_key() -> None:
    session = SecureSession(b"secret" + bytes(26), initiator=True)
    assert "secret" not in repr(session)
