"""Token pieces become text a whole character at a time."""

from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_broker.text import Detokenizer

HARD = "👩‍👩‍👧 歪 🇫🇷"


def fed(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer()
    return [detokenizer.feed(piece) for piece in pieces]


def split_at(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


@settings(deadline=None)
@given(st.text(), st.lists(st.integers(min_value=0)))
def test_joined_deltas_equal_the_text_however_its_bytes_are_split(text: str, cuts: list[int]) -> None:
    assert "".join(fed(split_at(text.encode(), cuts))) == text


@settings(deadline=None)
@given(st.binary(max_size=64), st.lists(st.integers(min_value=0)))
def test_any_bytes_give_the_same_text_however_they_are_split(data: bytes, cuts: list[int]) -> None:
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    assert "".join(fed(split_at(data, cuts))) == whole


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\ufffd")))
def test_an_incomplete_character_never_shows_as_a_replacement(text: str) -> None:
    deltas = fed([bytes([byte]) for byte in text.encode()])
    assert all("\ufffd" not in delta for delta in deltas)
    assert [delta for delta in deltas if delta] == list(text)


def test_a_family_a_rare_character_and_a_flag_arrive_whole_byte_by_byte() -> None:
    deltas = fed([bytes([byte]) for byte in HARD.encode()])
    assert "".join(deltas) == HARD
    assert all(len(delta) <= 1 for delta in deltas)


@pytest.mark.parametrize(
    ("pieces", "deltas"),
    [
        ([b"\xff"], ["\ufffd"]),
        ([b"a\x80b"], ["a\ufffdb"]),
        ([b"\xf0\x9f", b"\x98", b"x"], ["", "", "\ufffdx"]),
        ([b"\xe6", b"\xe6\xad\xaa"], ["", "\ufffd歪"]),
        ([b"\xed\xa0\x80"], ["\ufffd\ufffd\ufffd"]),
    ],
    ids=["never valid", "stray continuation", "cut short", "begun again", "surrogate"],
)
def test_invalid_bytes_become_replacements_as_soon_as_that_is_certain(pieces: list[bytes], deltas: list[str]) -> None:
    assert fed(pieces) == deltas


def test_a_real_replacement_character_passes() -> None:
    assert "".join(fed(["a\ufffdb".encode()])) == "a\ufffdb"


def test_an_incomplete_character_at_the_end_is_dropped() -> None:
    assert fed([b"ok", "歪".encode()[:2]]) == ["ok", ""]


def test_pieces_without_bytes_add_nothing_and_disturb_nothing() -> None:
    data = "歪".encode()
    assert fed([data[:1], b"", data[1:]]) == ["", "", "歪"]
