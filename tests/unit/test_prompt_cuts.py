"""How prompt chunks become calls: nothing lost, nothing over the limit, no lone row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_worker.llama.batch import Piece, calls_alone, calls_packed, cut


@pytest.mark.parametrize(
    ("length", "limit", "sizes"),
    [
        (512, 512, [512]),
        (513, 512, [511, 2]),
        (514, 512, [512, 2]),
        (1025, 512, [512, 511, 2]),
        (1, 512, [1]),
        (4, 3, [2, 2]),
        (7, 3, [3, 2, 2]),
        (0, 512, []),
    ],
)
def test_a_cut_leaves_no_lone_row(length: int, limit: int, sizes: list[int]) -> None:
    assert cut(length, limit, 2) == sizes


@given(st.integers(2, 5000), st.integers(3, 600))
def test_pieces_are_whole_and_within_bounds(length: int, limit: int) -> None:
    sizes = cut(length, limit, 2)
    assert sum(sizes) == length
    assert all(2 <= size <= limit for size in sizes)


@given(st.lists(st.integers(1, 700), max_size=8), st.integers(3, 600))
def test_alone_every_call_holds_one_piece_of_one_chunk(lengths: list[int], limit: int) -> None:
    calls = calls_alone(lengths, limit, 2)
    assert all(len(call) == 1 for call in calls)
    _check_coverage(lengths, calls)


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.integers(1, 600))
def test_packed_calls_take_what_fits_and_cut_only_what_is_longer_than_a_call(lengths: list[int], limit: int) -> None:
    calls = calls_packed(lengths, limit)
    rows = [sum(piece.size for piece in call) for call in calls]
    assert all(0 < count <= limit for count in rows)
    assert all(count + after[0].size > limit for count, after in zip(rows, calls[1:], strict=False))
    pieces = [piece for call in calls for piece in call]
    assert all(piece.last and piece.offset == 0 for piece in pieces if lengths[piece.item] <= limit)
    _check_coverage(lengths, calls)


def test_equal_prompts_share_calls_whole() -> None:
    assert [[piece.size for piece in call] for call in calls_packed([100] * 8, 512)] == [[100] * 5, [100] * 3]


def test_where_there_is_nothing_to_run_there_is_no_call() -> None:
    assert calls_packed([], 5) == []


def _check_coverage(lengths: list[int], calls: list[list[Piece]]) -> None:
    done = [0] * len(lengths)
    for piece in (piece for call in calls for piece in call):
        assert piece.offset == done[piece.item]
        done[piece.item] += piece.size
        assert piece.last == (done[piece.item] == lengths[piece.item])
    assert done == lengths
