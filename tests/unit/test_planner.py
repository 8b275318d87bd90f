"""Which rows a tick gets: chunks of prompts, and decode rows when there are more than a batch holds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_broker.planner import chunk_rows, evenly, pick_decodes, pick_prefills
from treadle_broker.session import Job, Session, SessionKey

lengths = st.integers(1, 300)


def _session(number: int, prompt: int = 4) -> Session:
    job = Job(client="ann", session_id=f"s{number}", prompt_tokens=prompt, max_new_tokens=1)
    return Session(key=SessionKey("ann", f"s{number}", 0), job=job, submitted_at=0.0, slot=number, prefill_rows=prompt)


# ---- one prompt's chunk


@given(lengths, lengths, st.integers(1, 4))
def test_a_chunk_is_as_large_as_the_rules_allow(remaining: int, budget: int, min_rows: int) -> None:
    rows = chunk_rows(remaining, budget, min_rows)

    def legal(size: int) -> bool:
        return size == remaining or (min_rows <= size <= remaining - min_rows)

    assert legal(rows)
    within = [size for size in range(1, min(remaining, budget) + 1) if legal(size)]
    smallest = min(size for size in range(1, remaining + 1) if legal(size))
    assert rows == (max(within) if within else rows)
    assert rows <= max(budget, 2 * min_rows - 1)
    assert rows >= smallest


@given(lengths, lengths)
def test_even_chunks_are_no_more_than_there_must_be_and_none_is_longer_than_it_must_be(rows: int, budget: int) -> None:
    size = evenly(rows, budget)
    chunks = -(-rows // budget)
    assert -(-rows // size) <= chunks
    assert size <= budget
    assert (size - 16) * chunks < rows


def test_a_long_prompt_runs_in_even_chunks_beside_streams() -> None:
    assert [evenly(700, 160), evenly(560, 160), evenly(140, 160), evenly(161, 160)] == [144, 144, 144, 96]


@pytest.mark.parametrize(
    ("remaining", "budget", "min_rows", "rows"),
    [
        (10, 4, 1, 4),
        (10, 100, 1, 10),
        (5, 4, 2, 3),  # four would leave one row alone
        (3, 2, 2, 3),  # nothing smaller is legal
        (2, 1, 2, 2),
        (1, 1, 2, 1),  # a prompt of one token is exempt
        (4, 1, 2, 2),
    ],
)
def test_a_chunk_leaves_no_row_alone(remaining: int, budget: int, min_rows: int, rows: int) -> None:
    assert chunk_rows(remaining, budget, min_rows) == rows


@given(st.integers(1, 400), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 3))
def test_any_sequence_of_budgets_gets_a_prompt_through_in_legal_chunks(
    prompt: int, budgets: list[int], min_rows: int
) -> None:
    left, chunks = prompt, []
    while left:
        chunks.append(chunk_rows(left, budgets[len(chunks) % len(budgets)], min_rows))
        left -= chunks[-1]
    assert sum(chunks) == prompt
    assert min(chunks) >= min(min_rows, prompt)


# ---- the chunks of a tick


def _picked(prompts: list[int], budget: int, min_rows: int = 1) -> list[int]:
    return [
        chunk.rows
        for chunk in pick_prefills([_session(n, prompt) for n, prompt in enumerate(prompts)], budget, min_rows)
    ]


def test_prompts_are_taken_in_order_until_the_budget_is_spent() -> None:
    assert _picked([4, 4, 4], 4) == [4]
    assert _picked([4, 4, 4], 10) == [4, 4, 2]
    assert _picked([20, 4], 8) == [8]
    assert _picked([4, 4], 100) == [4, 4]
    assert _picked([], 4) == []


def test_the_first_prompt_moves_even_where_a_legal_chunk_exceeds_the_budget() -> None:
    assert _picked([3, 3], 1, min_rows=2) == [3]
    assert _picked([5, 5], 1, min_rows=2) == [2]


def test_a_second_prompt_does_not_exceed_the_budget() -> None:
    assert _picked([4, 5], 5, min_rows=2) == [4]
    assert _picked([4, 5], 6, min_rows=2) == [4, 2]


@given(st.lists(lengths, max_size=12), lengths, st.integers(1, 3))
def test_a_ticks_prefill_is_bounded(prompts: list[int], budget: int, min_rows: int) -> None:
    rows = _picked(prompts, budget, min_rows)
    assert bool(rows) == bool(prompts)
    assert sum(rows) <= budget or (len(rows) == 1 and rows[0] < 2 * min_rows)
    if min_rows == 1:
        assert all(chunk == prompt for chunk, prompt in zip(rows[:-1], prompts, strict=False))


# ---- decode rows


def test_everybody_decodes_while_the_batch_has_room() -> None:
    ready = [_session(number) for number in range(4)]
    assert pick_decodes(ready, 4) == ready
    assert pick_decodes(ready, 9) == ready
    assert pick_decodes([], 4) == []


def test_those_whose_last_turn_lies_furthest_back_go_first() -> None:
    ready = [_session(number) for number in range(4)]
    for session, turn in zip(ready, (9, 3, 7, 5), strict=True):
        session.last_turn = turn
    assert [session.slot for session in pick_decodes(ready, 2)] == [1, 3]


@given(st.integers(1, 9), st.integers(1, 9))
def test_turns_go_round(sessions: int, limit: int) -> None:
    ready = [_session(number) for number in range(sessions)]
    counts: Counter[int | None] = Counter()
    turn = 0
    for _ in range(3 * sessions):
        for session in pick_decodes(ready, limit):
            turn += 1
            session.last_turn = turn
            counts[session.slot] += 1
        assert max(counts.values()) - min(counts[session.slot] for session in ready) <= 1
