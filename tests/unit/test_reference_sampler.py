"""The reference sampler honours every parameter, in the order of the chain."""

import math
from collections import Counter

import numpy as np
import pytest

from treadle_shared import SamplingParams
from treadle_shared.bytevocab import N_VOCAB
from treadle_worker.reference.sampler import Sampler, uniform


def row_of(**scores):
    """A logits row that is -10 but for tokens t0, t1, …"""
    row = np.full(N_VOCAB, -10.0, dtype=np.float32)
    for name, score in scores.items():
        row[int(name[1:])] = score
    return row


def drawn(logits, draws=400, **params):
    """Which tokens ``draws`` draws choose, and how often."""
    sampler = Sampler(SamplingParams(seed=7, **({"temperature": 1.0} | params)))
    counts = Counter()
    for draw in range(draws):
        sampler.feed([], draw)
        counts[sampler.choose(logits)] += 1
    return counts


def test_draws_follow_the_distribution():
    counts = drawn(row_of(t1=math.log(6), t2=math.log(3), t3=0.0), 4000, top_k=3, top_p=1.0, min_p=0.0)
    assert set(counts) == {1, 2, 3}
    for token, share in ((1, 0.6), (2, 0.3), (3, 0.1)):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)


def test_top_k_keeps_the_k_likeliest():
    row = row_of(t1=2.0, t2=1.9, t3=1.8, t4=1.7)
    assert set(drawn(row, top_k=2, top_p=1.0, min_p=0.0)) == {1, 2}
    assert set(drawn(row, top_k=1, top_p=1.0, min_p=0.0)) == {1}
    assert set(drawn(row, top_k=0, top_p=1.0, min_p=0.0)) >= {1, 2, 3, 4}


def test_top_p_keeps_the_fewest_that_reach_p():
    row = row_of(t1=math.log(6), t2=math.log(3), t3=0.0)
    assert set(drawn(row, top_k=3, top_p=0.5, min_p=0.0)) == {1}
    assert set(drawn(row, top_k=3, top_p=0.7, min_p=0.0)) == {1, 2}
    assert set(drawn(row, top_k=3, top_p=0.95, min_p=0.0)) == {1, 2, 3}
    assert set(drawn(row, top_k=3, top_p=0.0, min_p=0.0)) == {1}


def test_min_p_is_relative_to_the_likeliest():
    row = row_of(t1=math.log(6), t2=math.log(3), t3=0.0)
    assert set(drawn(row, top_k=3, top_p=1.0, min_p=0.4)) == {1, 2}
    assert set(drawn(row, top_k=3, top_p=1.0, min_p=0.6)) == {1}


def test_filters_look_at_the_distribution_before_temperature():
    row = row_of(t1=math.log(6), t2=math.log(3), t3=0.0)
    assert set(drawn(row, top_k=3, top_p=0.7, min_p=0.0, temperature=100.0)) == {1, 2}


def test_temperature_near_zero_takes_the_likeliest():
    assert set(drawn(row_of(t1=1.0, t2=0.999), temperature=1e-300)) == {1}


def test_logit_bias_moves_a_token_and_one_outside_the_vocabulary_moves_nothing():
    assert Sampler(SamplingParams(logit_bias={5: 30.0, 9999: 1e6})).choose(row_of(t1=10.0)) == 5
    assert Sampler(SamplingParams(logit_bias={1: -1e6})).choose(row_of(t1=10.0, t2=9.0)) == 2


def fed(tokens, **params):
    sampler = Sampler(SamplingParams(**params))
    sampler.feed(tokens, 0)
    return sampler


def test_penalties_push_seen_tokens_down():
    row = row_of(t1=3.0, t2=2.0)
    assert fed([1], repeat_penalty=1.4).choose(row) == 1
    assert fed([1], repeat_penalty=1.6).choose(row) == 2
    assert fed([1], presence_penalty=1.5).choose(row) == 2
    assert fed([1, 1], frequency_penalty=0.6).choose(row) == 2
    assert fed([1], frequency_penalty=0.6).choose(row) == 1


def test_a_repeat_penalty_lowers_negative_logits_too():
    row = np.full(N_VOCAB, -9.0, dtype=np.float32)
    row[1], row[2] = -1.0, -1.5
    assert fed([1], repeat_penalty=2.0).choose(row) == 2


def test_penalties_look_at_the_last_n_tokens_of_prompt_and_answer():
    row = row_of(t1=3.0, t2=2.0)
    assert fed([1, 8, 9], presence_penalty=2.0, penalty_last_n=3).choose(row) == 2
    assert fed([1, 8, 9], presence_penalty=2.0, penalty_last_n=2).choose(row) == 1
    sampler = fed([8], presence_penalty=2.0, penalty_last_n=2)
    sampler.feed([1], 1)
    assert sampler.choose(row) == 2


def test_the_kth_draw_depends_on_seed_and_k_alone():
    row = row_of(t1=1.0, t2=1.0, t3=1.0)
    straight = Sampler(SamplingParams(temperature=1.0, seed=4))
    tokens = []
    for draw in range(20):
        straight.feed([], draw)
        tokens.append(straight.choose(row))
    late = Sampler(SamplingParams(temperature=1.0, seed=4))
    late.feed([], 13)
    assert late.choose(row) == tokens[13]
    assert len(set(tokens)) == 3


def test_uniform_draws_fill_the_unit_interval_and_differ_by_seed():
    draws = [uniform(1, k) for k in range(2000)]
    assert 0.0 <= min(draws) < 0.01
    assert 0.99 < max(draws) < 1.0
    assert sum(draws) / 2000 == pytest.approx(0.5, abs=0.03)
    assert len({uniform(seed, 0) for seed in range(100)}) == 100
