"""Where sequences are put, and which moves close the gaps between those that decode."""

from __future__ import annotations

import random

import pytest

from treadle_worker.llama.places import Move, Places


def taken(count: int, price: float, places: list[int], sessions: int | None = None) -> Places:
    """``count`` places, all but these free."""
    found = Places(count, sessions or count, price)
    for _ in range(count):
        found.take(decodes_next=True)
    for place in set(range(count)) - set(places):
        found.give_back(place)
    return found


def test_new_sequences_take_the_lowest_place() -> None:
    places = Places(4, 4, 1.0)
    assert [places.take(decodes_next=True) for _ in range(3)] == [0, 1, 2]
    places.give_back(1)
    assert places.take(decodes_next=True) == 1


def test_a_prompt_of_several_ticks_stays_out_of_the_gap() -> None:
    places = taken(8, 100.0, [0, 1, 3])
    places.move_for([0, 1, 3])
    assert places.take(decodes_next=False) == 4
    assert places.take(decodes_next=True) == 2
    full = taken(4, 100.0, [0, 1, 3])
    full.move_for([0, 1, 3])
    assert full.take(decodes_next=False) == 2  # where else


def test_what_never_decodes_goes_to_the_end() -> None:
    places = taken(8, 1.0, [0, 1])
    assert [places.take_last(), places.take_last()] == [7, 6]


def test_what_decodes_leaves_the_end_to_what_is_kept() -> None:
    places = taken(3, 1.0, [0, 1], sessions=2)
    places.move_for([0, 1])
    places.give_back(1)
    assert places.take(decodes_next=False) == 1
    assert places.take_last() == 2
    assert taken(6, 0.0, [0, 1, 3, 4], sessions=5).move_for([0, 3, 4]) == Move(4, 2)  # not up into 5


@pytest.mark.parametrize(
    ("held", "decoding", "move"),
    [
        ([0, 1, 2], [0, 1, 2], None),
        ([3, 4], [3, 4], None),
        ([0, 1, 3], [0, 1, 3], Move(3, 2)),
        ([0, 5, 6, 7], [0, 5, 6, 7], Move(0, 4)),  # one, not three
        ([0, 1, 2, 3], [0, 1, 3], None),  # the gap is a prompt's, which decodes soon
        ([0, 1, 2, 4, 5, 6, 7], [0, 1, 4, 5, 6, 7], Move(7, 3)),  # 2 is held by one that decodes soon
        ([0, 1, 2, 3, 4, 9], [0, 1, 3, 4], None),  # above is room for all, but it would take four moves
        ([0, 1, 3, 4], [0, 1, 4], Move(4, 2)),
    ],
)
def test_the_move_is_towards_where_most_are(held: list[int], decoding: list[int], move: Move | None) -> None:
    assert taken(10, 0.5, held).move_for(decoding) == move


def test_a_gap_is_closed_when_it_has_cost_as_much_as_closing_it() -> None:
    places = taken(8, 3.5, [0, 2, 3])
    assert [places.move_for([0, 2, 3]) for _ in range(4)] == [None, None, None, Move(3, 1)]
    assert places.move_for([0, 2, 3]) is None  # and the account is settled
    twice = taken(8, 3.5, [0, 2, 4])
    assert [twice.move_for([0, 2, 4]) for _ in range(2)] == [None, Move(4, 1)]


def test_a_batch_without_gaps_settles_the_account() -> None:
    places = taken(8, 1.5, [0, 2, 3])
    assert places.move_for([0, 2, 3]) is None
    assert places.move_for([2, 3]) is None
    assert places.move_for([0, 2, 3]) is None


@pytest.mark.parametrize("seed", range(20))
def test_moves_end_without_gaps_and_never_need_more_than_there_are_outsiders(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 40)
    decoding = sorted(chance.sample(range(count), chance.randint(1, count)))
    places = taken(count, 0.0, decoding)
    moves = 0
    while (move := places.move_for(decoding)) is not None:
        assert move.source in decoding
        assert move.target not in decoding
        places.moved(move)
        decoding = sorted({*decoding, move.target} - {move.source})
        moves += 1
    assert decoding[-1] - decoding[0] == len(decoding) - 1
    assert moves < len(decoding)
    assert sorted([*decoding, *(places.take(decodes_next=True) for _ in range(count - len(decoding)))]) == [
        *range(count)
    ]
