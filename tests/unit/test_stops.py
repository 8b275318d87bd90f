"""Stop strings are cut exactly, over any split of the text into deltas."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_broker.text import StopMatcher
from treadle_broker.text.assembler import AnswerText
from treadle_broker.text.tokenizer import ByteTokenizer

FEW_LETTERS = st.text(alphabet="ab€", max_size=24)
STOPS = st.lists(st.text(alphabet="ab€", min_size=1, max_size=6), min_size=1, max_size=5)


def reference(text: str, stops: list[str]) -> tuple[str, str]:
    """The text before the stop string that completes first (of those, the longest), and that string."""
    found = [
        (start + len(stop), start, stop) for stop in stops for start in range(len(text)) if text.startswith(stop, start)
    ]
    if not found:
        return text, ""
    _, start, stop = min(found)
    return text[:start], stop


def run(deltas: list[str], stops: list[str]) -> tuple[list[str], str]:
    matcher = StopMatcher(stops)
    given_out = [matcher.feed(delta) for delta in deltas]
    return [*given_out, matcher.finish()], matcher.matched


def split_at(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


@settings(max_examples=1000, deadline=None)
@given(FEW_LETTERS, STOPS, st.lists(st.integers(min_value=0), max_size=24))
def test_any_text_is_cut_as_the_whole_text_would_be(text: str, stops: list[str], cuts: list[int]) -> None:
    given_out, matched = run(split_at(text, cuts), stops)
    assert ("".join(given_out), matched) == reference(text, stops)


def possible_beginning(text: str, stops: list[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of a stop string."""
    return max(k for stop in stops for k in range(len(stop)) if k <= len(text) and text.endswith(stop[:k]))


@settings(max_examples=300, deadline=None)
@given(FEW_LETTERS, STOPS)
def test_exactly_the_possible_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    for end, character in enumerate(text, 1):
        out += matcher.feed(character)
        if matcher.matched:
            break
        assert out == text[: end - possible_beginning(text[:end], stops)]


@pytest.mark.parametrize(
    ("deltas", "stops", "out", "matched"),
    [
        (["aa", "ab"], ["aab"], "a", "aab"),
        (["aaab"], ["aab"], "a", "aab"),
        (["one STOP two"], ["STOP"], "one ", "STOP"),
        (["x", "S", "T", "O", "P", "y"], ["STOP"], "x", "STOP"),
        (["abcd"], ["abcd", "bc"], "a", "bc"),
        (["abc"], ["c", "bc", "abc"], "", "abc"),
        (["ab", "c"], ["ab", "abc"], "", "ab"),
        (["naïve 👩‍👩‍👧", "\u200d👦!"], ["👧\u200d👦"], "naïve 👩‍👩‍", "👧\u200d👦"),
        (["STO", "NE"], ["STOP"], "STONE", ""),
        (["end ST"], ["STOP"], "end ST", ""),
        (["\n", "\nUser:"], ["\n\nUser:", "\n\n"], "", "\n\n"),
        (["aabaaaabaaa€"], ["aabaaa€"], "aabaa", "aabaaa€"),
        (["aaabaabb"], ["aaabb"], "aaabaabb", ""),
        ([""], ["x"], "", ""),
    ],
)
def test_stop_strings_are_cut_exactly(deltas: list[str], stops: list[str], out: str, matched: str) -> None:
    given_out, found = run(deltas, stops)
    assert ("".join(given_out), found) == (out, matched)


def test_held_text_comes_out_as_soon_as_it_cannot_be_a_stop_string() -> None:
    matcher = StopMatcher(["STOP"])
    assert [matcher.feed(delta) for delta in ("a", "ST", "OR", "Y")] == ["a", "", "STOR", "Y"]
    assert matcher.finish() == ""


def test_only_what_may_belong_to_a_stop_string_is_held() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.feed("aaaa") == "aa"
    assert matcher.finish() == "aa"


def test_text_after_a_stop_string_is_dropped() -> None:
    matcher = StopMatcher(["."])
    assert [matcher.feed("a.b"), matcher.feed("c"), matcher.finish()] == ["a", "", ""]


def test_without_stop_strings_everything_passes() -> None:
    matcher = StopMatcher([])
    assert (matcher.feed("anything"), matcher.finish(), matcher.matched) == ("anything", "", "")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_an_answer_stops_at_the_token_that_completes_a_stop_string() -> None:
    answer = AnswerText(ByteTokenizer(), ["歪b"])
    steps = [answer.feed(byte) for byte in "a歪bc".encode()]
    assert steps == [("a", False), ("", False), ("", False), ("", False), ("", True), ("", True)]
    assert (answer.finish(), answer.stop, answer.chars) == ("", "歪b", 1)


def test_an_answer_gives_out_what_it_held_when_it_finishes() -> None:
    answer = AnswerText(ByteTokenizer(), ["bcd"])
    assert "".join(answer.feed(byte)[0] for byte in b"abc") == "a"
    assert (answer.finish(), answer.stop, answer.chars) == ("bc", "", 3)


def test_an_answer_without_stop_strings_counts_its_characters() -> None:
    answer = AnswerText(ByteTokenizer())
    text = "".join(answer.feed(token)[0] for token in [*"歪é".encode(), 257])
    assert (text, answer.finish(), answer.chars, answer.stop) == ("歪é", "", 2, "")
