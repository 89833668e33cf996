"""World info."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.outcome import assert_one_line, error_of

from dsl.errors import WorldInfoError
from dsl.resources.world import decode_world_info, encode_world_info

worlds = st.dictionaries(
    st.text(), st.lists(st.integers(0, 1000), unique=True, max_size=8), min_size=1, max_size=6
)


@given(worlds)
def test_world_info_survives_the_round_trip_in_order(world: dict[str, list[int]]) -> None:
    assert list(decode_world_info(encode_world_info(world)).items()) == list(world.items())


@pytest.mark.guarantee("G8")
@given(st.one_of(st.text(), st.binary().map(lambda data: base64.urlsafe_b64encode(data).decode())))
def test_any_text_is_a_world_or_an_error_in_one_line(text: str) -> None:
    error = error_of(WorldInfoError, decode_world_info, text)
    if error is not None:
        assert_one_line(error)
    else:
        assert decode_world_info(text)


def _encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "text, message",
    [
        ("None", "world_info can not be None"),
        ("a b", "world info 'a b' is not URL-safe base64"),
        ("abcde", "is not URL-safe base64: "),
        ("", "does not hold JSON"),
        (_encoded("{"), "does not hold JSON"),
        (_encoded("[" * 100_000), "does not hold JSON"),
        (_encoded("[1]"), "does not hold an object"),
        (_encoded("{}"), "does not hold an object"),
        (_encoded('{"a": 2}'), "the slots of 'a' are not distinct whole numbers"),
        (_encoded('{"a": [true]}'), "the slots of 'a' are not distinct whole numbers"),
        (_encoded('{"a": [1, 1]}'), "the slots of 'a' are not distinct whole numbers"),
        (_encoded('{"a": [-1]}'), "the slots of 'a' are not distinct whole numbers"),
    ],
)
def test_what_is_no_world_info_says_why(text: str, message: str) -> None:
    with pytest.raises(WorldInfoError) as caught:
        decode_world_info(text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200
