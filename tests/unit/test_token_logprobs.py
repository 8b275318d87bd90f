"""Log-probabilities against a plain float computation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from treadle_worker.llama.logprobs import token_logprobs


def test_they_are_the_log_softmax_of_the_row() -> None:
    row = np.array([0.5, -1.25, 3.0, 2.0], np.float32)
    total = sum(math.exp(value) for value in row.tolist())
    found = token_logprobs(row, 1, 4)
    assert found.chosen == pytest.approx(math.log(math.exp(-1.25) / total), abs=1e-12)
    assert [token for token, _ in found.top] == [2, 3, 0, 1]
    assert sum(math.exp(value) for _, value in found.top) == pytest.approx(1.0, abs=1e-12)


def test_huge_logits_do_not_overflow() -> None:
    found = token_logprobs(np.array([1e30, 1e30, -1e30], np.float32), 0, 2)
    assert found.chosen == pytest.approx(-math.log(2))
    assert [token for token, _ in found.top] == [0, 1]


def test_equal_tokens_are_listed_by_id() -> None:
    row = np.zeros(100, np.float32)
    row[[7, 50]] = 1.0
    assert [token for token, _ in token_logprobs(row, 0, 4).top] == [7, 50, 0, 1]


def test_none_and_more_than_the_vocabulary_are_fine() -> None:
    row = np.arange(3, dtype=np.float32)
    assert token_logprobs(row, 2, 0).top == []
    assert len(token_logprobs(row, 2, 20).top) == 3


def test_the_row_itself_is_left_alone() -> None:
    row = np.arange(5, dtype=np.float32)
    token_logprobs(row, 0, 3)
    assert row.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("size", [1, 255, 256, 257, 20 * 256, 20 * 256 + 1, 49_152])
def test_the_list_is_that_of_a_full_sort_whatever_the_vocabulary(size: int) -> None:
    random = np.random.default_rng(size)
    for row in (random.normal(size=size), random.integers(0, 30, size), np.sort(random.normal(size=size))):
        row = row.astype(np.float32)
        wanted = sorted(range(size), key=lambda token, row=row: (-row[token], token))[:20]
        assert [token for token, _ in token_logprobs(row, 0, 20).top] == wanted
