"""The reference engine holds the batch contract: isolation, exactness, misses, resumable draws."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_shared import BatchEngine, DecodeItem, NodeConfig, PrefillItem, SamplingParams, TickRunner
from treadle_shared.bytevocab import BOS, EOS, N_VOCAB, encode_bytes
from treadle_shared.errors import InvalidTick, PartialShardError, WeightBudgetError
from treadle_shared.ticks import DecodeRow, PrefillRow, Tick
from treadle_shared.tokens import pack_tokens
from treadle_worker.reference import (
    KvBatchEngine,
    KvBoundaryAdapter,
    ReferenceModel,
    SessionCache,
    build_reference_engine,
)
from treadle_worker.reference.adapter import Span
from treadle_worker.reference.kv import SequenceKv

MODEL = ReferenceModel()
KV_BYTES = 1536
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, seed=11, ignore_eos=True)
PROMPTS = [encode_bytes(text) for text in ("one", "two words", "", "a longer prompt, the fourth of them")]


def make_engine(kv_tokens=4096, context_tokens=512, model=MODEL):
    adapter = KvBoundaryAdapter(model)
    cache = SessionCache(adapter.kv_layout, kv_tokens * adapter.kv_bytes_per_token)
    return KvBatchEngine(adapter, cache, context_tokens=context_tokens, max_sequences=32)


@pytest.fixture
def engine():
    engine = make_engine()
    yield engine
    engine.check()


def opened(session, prompt, params=GREEDY, sample=True, n_emitted=0):
    return PrefillItem(session, 0, 0, prompt, sample, n_emitted, params)


def solo(engine, prompt, count, params=GREEDY, session="solo"):
    """``count`` tokens of one session that runs alone."""
    tokens = [engine.prefill([opened(session, prompt, params)])[0].token]
    while len(tokens) < count:
        pos = len(prompt) + len(tokens) - 1
        tokens.append(engine.decode_batch([DecodeItem(session, 0, pos)])[0].token)
    engine.release(session, 0)
    return tokens


def together(engine, prompts, count, params):
    """``count`` tokens of each of several sessions, prefilled and decoded as one batch."""
    items = [opened(n, prompt, p) for n, (prompt, p) in enumerate(zip(prompts, params, strict=True))]
    answers = [[step.token] for step in engine.prefill(items)]
    for done in range(count - 1):
        rows = [DecodeItem(n, 0, len(prompt) + done) for n, prompt in enumerate(prompts)]
        for answer, step in zip(answers, engine.decode_batch(rows), strict=True):
            answer.append(step.token)
    return answers


# ---- the contract


def test_it_is_a_batch_engine(engine):
    assert isinstance(engine, BatchEngine)


def test_facts_tell_what_the_model_costs(engine):
    facts = engine.facts
    assert (facts.n_vocab, facts.context_tokens, facts.max_sequences) == (N_VOCAB, 512, 32)
    assert (facts.kv_bytes_per_token, facts.weight_bytes) == (KV_BYTES, MODEL.weight_bytes)
    assert (facts.min_prefill_rows, facts.replay_decode, facts.exact) == (1, False, True)
    assert facts.tokenizer_fingerprint == "bytes"
    assert facts.scratch_bytes_per_session > N_VOCAB * 4
    assert facts.prefill_tokens_per_s > 0
    assert facts.decode_tick_s > 0
    assert engine.kv_tokens == 0


def test_fingerprint_is_the_same_for_every_start_and_another_for_another_seed():
    assert make_engine().recipe_fingerprint == make_engine().facts.recipe_fingerprint
    assert make_engine().recipe_fingerprint != make_engine(model=ReferenceModel(seed=1)).recipe_fingerprint


def test_a_partial_shard_is_refused():
    adapter = KvBoundaryAdapter(MODEL, 0, 2)
    with pytest.raises(PartialShardError, match=r"\[0, 2\) of 3"):
        KvBatchEngine(adapter, SessionCache(adapter.kv_layout, KV_BYTES), context_tokens=8, max_sequences=1)


def test_a_configuration_becomes_an_engine_with_room_for_every_session():
    engine = build_reference_engine(NodeConfig(engine="reference", max_sessions=3, session_tokens=16, cache_slots=0))
    assert (engine.facts.max_sequences, engine.facts.context_tokens) == (3, 16)
    whole = engine.prefill([opened(n, [n] * 16) for n in range(3)])
    assert not any(step.cache_miss for step in whole)
    assert engine.prefill([opened(3, [1])])[0].cache_miss is False
    assert engine.decode_batch([DecodeItem(3, 0, 1)])[0].cache_miss is False
    assert engine.kv_tokens == 2 * 16 + 2


def test_a_configured_kv_budget_and_seed_are_taken():
    config = NodeConfig(engine="reference", session_tokens=16, kv_bytes=4 * KV_BYTES, reference_seed=9)
    engine = build_reference_engine(config)
    assert engine.prefill([opened(0, [1] * 5)])[0].cache_miss
    assert engine.recipe_fingerprint == make_engine(model=ReferenceModel(seed=9)).recipe_fingerprint


def test_weights_over_their_budget_are_refused_with_both_figures():
    needed = MODEL.weight_bytes
    build_reference_engine(NodeConfig(engine="reference", weight_bytes=needed))
    with pytest.raises(WeightBudgetError, match=rf"{needed} bytes .* {needed - 1}$"):
        build_reference_engine(NodeConfig(engine="reference", weight_bytes=needed - 1))


def test_timings_split_the_engine_from_sampling():
    ticks = iter(range(1000))
    adapter = KvBoundaryAdapter(MODEL)
    cache = SessionCache(adapter.kv_layout, 100 * KV_BYTES)
    engine = KvBatchEngine(adapter, cache, context_tokens=64, max_sequences=4, clock=lambda: float(next(ticks)) ** 2)
    engine.prefill([opened(0, [1, 2])])
    engine_s, sample_s = engine.last_timings
    assert sample_s == engine_s + 2  # the clock's steps grow by two


# ---- isolation and exactness


def test_four_divergent_sessions_in_a_batch_equal_their_solo_runs(engine):
    params = [GREEDY, SAMPLED, SamplingParams(ignore_eos=True), SamplingParams(temperature=1.5, seed=3)]
    alone = [solo(engine, prompt, 24, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    assert together(engine, PROMPTS, 24, params) == alone
    assert len({tuple(answer) for answer in alone}) == 4


@pytest.mark.parametrize("length", [1, 3, 7])
def test_positions_are_isolated(engine, length):
    prompts = [[(31 * n + 7 * i) % 256 for i in range(length + n)] for n in range(4)]
    alone = [solo(engine, prompt, 12) for prompt in prompts]
    assert together(engine, prompts, 12, [GREEDY] * 4) == alone


@pytest.mark.parametrize("chunks", [[36], [1] * 36, [35, 1], [1, 35], [16, 16, 4]])
def test_prefill_chunking_changes_no_token(engine, chunks):
    prompt = PROMPTS[3]
    start, step = 0, None
    for count in chunks:
        last = start + count == len(prompt)
        params = SAMPLED if start == 0 else None
        step = engine.prefill([PrefillItem(0, 0, start, prompt[start : start + count], last, 0, params)])[0]
        start += count
    answer = [step.token]
    for pos in range(len(prompt), len(prompt) + 15):
        answer.append(engine.decode_batch([DecodeItem(0, 0, pos)])[0].token)
    assert answer == solo(engine, prompt, 16, SAMPLED)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_logits_bits_do_not_depend_on_the_batch(lengths, chunk, seed):
    adapter = KvBoundaryAdapter(MODEL)
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, N_VOCAB, length) for length in lengths]
    kvs = [SequenceKv(adapter.kv_layout) for _ in prompts]
    for kv in kvs:
        kv.reserve(64)
    got = [[] for _ in prompts]
    for start in range(0, max(lengths), chunk):
        live = [n for n, length in enumerate(lengths) if length > start]
        parts = [prompts[n][start : start + chunk] for n in live]
        spans = [Span(kvs[n], start, len(part)) for n, part in zip(live, parts, strict=True)]
        rows = adapter.forward(np.concatenate(parts), spans)
        for n, part in zip(live, parts, strict=True):
            got[n].append(rows[: len(part)])
            rows = rows[len(part) :]
    for prompt, rows in zip(prompts, got, strict=True):
        alone = SequenceKv(adapter.kv_layout)
        alone.reserve(64)
        assert np.array_equal(np.concatenate(rows), adapter.forward(prompt, [Span(alone, 0, len(prompt))]))


def test_a_cached_run_equals_recomputing_everything_for_each_token(engine):
    prompt, answer = PROMPTS[1], []
    for _ in range(12):
        answer.append(engine.prefill([opened("again", prompt + answer)])[0].token)
    assert answer == solo(engine, prompt, 12)


def test_two_engines_repeat_each_other():
    assert solo(make_engine(), PROMPTS[3], 32, SAMPLED) == solo(make_engine(), PROMPTS[3], 32, SAMPLED)


def test_prefill_beside_decoding_sessions_disturbs_nobody(engine):
    alone = solo(engine, PROMPTS[0], 8)
    answer = [engine.prefill([opened("a", PROMPTS[0])])[0].token]
    for n in range(7):
        answer.append(engine.decode_batch([DecodeItem("a", 0, len(PROMPTS[0]) + n)])[0].token)
        engine.prefill([opened(n, PROMPTS[3])])
    assert answer == alone


# ---- rows that force a token or yield none


def test_forced_rows_rebuild_a_session_exactly(engine):
    prompt = PROMPTS[1]
    whole = solo(engine, prompt, 20, SAMPLED)
    assert engine.prefill([opened("r", prompt, SAMPLED, sample=False)])[0].token is None
    for n, token in enumerate(whole[:9]):
        step = engine.decode_batch([DecodeItem("r", 0, len(prompt) + n, token, sample=False)])[0]
        assert (step.token, step.cache_miss) == (None, False)
    rest = [engine.decode_batch([DecodeItem("r", 0, len(prompt) + 9, whole[9])])[0].token]
    for n in range(10, 19):
        rest.append(engine.decode_batch([DecodeItem("r", 0, len(prompt) + n)])[0].token)
    assert rest == whole[10:]


@pytest.mark.parametrize(("chunk", "told_on_every_chunk"), [(100, True), (7, True), (7, False)])
def test_a_prefilled_history_takes_up_the_draws_where_they_were(engine, chunk, told_on_every_chunk):
    params = SamplingParams(temperature=1.2, seed=5, ignore_eos=True, repeat_penalty=1.3, penalty_last_n=6)
    prompt = PROMPTS[1]
    whole = solo(engine, prompt, 20, params)
    history = prompt + whole[:8]
    for start in range(0, len(history), chunk):
        part, last = history[start : start + chunk], start + chunk >= len(history)
        n_emitted = 8 if told_on_every_chunk or start == 0 else 0
        item = PrefillItem("r", 0, start, part, last, n_emitted, params if start == 0 else None)
        step = engine.prefill([item])[0]
    rest = [step.token]
    for n in range(8, 19):
        rest.append(engine.decode_batch([DecodeItem("r", 0, len(prompt) + n)])[0].token)
    assert rest == whole[8:]


def test_a_row_without_a_token_to_feed_is_refused(engine):
    engine.prefill([opened(0, [1, 2], sample=False)])
    with pytest.raises(InvalidTick, match="no token"):
        engine.decode_batch([DecodeItem(0, 0, 2)])
    assert engine.kv_tokens == 2


def test_a_row_run_for_its_kv_alone_leaves_no_token_to_feed(engine):
    engine.prefill([opened(0, [1, 2])])
    engine.decode_batch([DecodeItem(0, 0, 2, sample=False)])
    with pytest.raises(InvalidTick, match="no token"):
        engine.decode_batch([DecodeItem(0, 0, 3)])


def test_items_that_contradict_the_cache_are_refused_before_anything_runs(engine):
    engine.prefill([opened(0, [1, 2, 3]), opened(1, [4])])
    with pytest.raises(InvalidTick, match="position 5"):
        engine.decode_batch([DecodeItem(1, 0, 1), DecodeItem(0, 0, 5)])
    with pytest.raises(InvalidTick, match="position 2"):
        engine.prefill([PrefillItem(0, 0, 2, [9], True)])
    with pytest.raises(InvalidTick, match="more than one"):
        engine.decode_batch([DecodeItem(1, 0, 1), DecodeItem(1, 0, 1)])
    with pytest.raises(InvalidTick, match="do not fit"):
        engine.prefill([opened(2, [1] * 513)])
    assert engine.kv_tokens == 4


# ---- KV: misses, epochs, release


def test_an_evicted_session_gets_a_miss_and_never_a_token():
    engine = make_engine(kv_tokens=10)
    engine.prefill([opened("a", [1] * 6)])
    engine.prefill([opened("b", [2] * 6)])
    miss = engine.decode_batch([DecodeItem("a", 0, 6), DecodeItem("b", 0, 6)])
    assert [(step.cache_miss, step.token is None) for step in miss] == [(True, True), (False, False)]
    assert engine.kv_tokens == 7
    assert engine.decode_batch([DecodeItem("a", 0, 6, token=1)])[0].cache_miss
    assert engine.prefill([PrefillItem("a", 0, 6, [1, 2], True)])[0].cache_miss


def test_an_evicted_session_can_be_prefilled_again():
    prompt = PROMPTS[0]
    whole = solo(make_engine(), prompt, 8)
    engine = make_engine(kv_tokens=12)
    assert engine.prefill([opened("a", prompt)])[0].token == whole[0]
    engine.prefill([opened("b", [1] * 12)])
    assert engine.decode_batch([DecodeItem("a", 0, len(prompt))])[0].cache_miss
    assert engine.prefill([opened("a", prompt + whole[:4], n_emitted=4)])[0].token == whole[4]


def test_a_batch_that_outgrows_the_budget_loses_one_session_and_the_rest_go_on():
    alone = [solo(make_engine(), prompt, 3) for prompt in ([1] * 4, [2] * 4)]
    engine = make_engine(kv_tokens=9)
    first = engine.prefill([opened(0, [1] * 4), opened(1, [2] * 4)])
    second = engine.decode_batch([DecodeItem(0, 0, 4), DecodeItem(1, 0, 4)])
    assert [step.token for step in first] == [alone[0][0], alone[1][0]]
    assert [step.cache_miss for step in second] == [False, True]
    assert second[0].token == alone[0][1]
    assert engine.kv_tokens == 5


def test_another_epoch_never_sees_the_old_one(engine):
    engine.prefill([opened("a", [1, 2, 3])])
    assert engine.decode_batch([DecodeItem("a", 1, 3)])[0].cache_miss
    fresh = engine.prefill([PrefillItem("a", 1, 0, [7], True, 0, GREEDY)])[0]
    assert (fresh.token, fresh.epoch) == (solo(engine, [7], 1)[0], 1)


def test_release_gives_all_kv_back(engine):
    engine.prefill([opened(n, PROMPTS[n]) for n in range(4)])
    assert engine.kv_tokens == sum(map(len, PROMPTS))
    for n in range(4):
        engine.release(n, 0)
        engine.release(n, 0)
    assert engine.kv_tokens == 0
    assert engine.decode_batch([DecodeItem(0, 0, len(PROMPTS[0]))])[0].cache_miss


def test_an_empty_batch_is_no_error(engine):
    assert engine.decode_batch([]) == []
    assert engine.prefill([]) == []


def test_it_runs_ticks_under_the_runner(engine):
    runner = TickRunner(engine)
    prompt, answer = PROMPTS[0], solo(engine, PROMPTS[0], 3)

    def run(tick_id, **rows):
        return list(runner.run(Tick(broker_id="b", worker_id="w", tick_id=tick_id, **rows)))

    (first,) = run(0, prefill=[PrefillRow(0, 1, 0, pack_tokens(prompt), True, 0, GREEDY)])
    (second,) = run(1, decode=[DecodeRow(0, 1, len(prompt))])
    (third,) = run(2, decode=[DecodeRow(0, 1, len(prompt) + 1)])
    assert [part.rows[0].token for part in (first, second, third)] == answer
    assert third.timings.engine_s > 0
    runner.check()
    (last,) = run(3, release=[0])
    assert last.kv_tokens == 0


# ---- sampling


def test_end_of_generation_is_marked_and_ignore_eos_masks_it(engine):
    wants_eos = SamplingParams(logit_bias={EOS: 1000.0})
    assert engine.prefill([opened(0, [1], wants_eos)])[0].eog
    masked = SamplingParams(logit_bias={EOS: 1000.0}, ignore_eos=True)
    sampled = SamplingParams(logit_bias={EOS: 1000.0}, ignore_eos=True, temperature=1.0, seed=1)
    steps = engine.prefill([opened(1, [1], masked), opened(2, [1], sampled)])
    assert not any(step.eog or step.token == EOS for step in steps)
    assert steps[0].token == solo(engine, [1], 1)[0]


def test_logprobs_are_over_the_raw_logits(engine):
    params = SamplingParams(logprobs=3, logit_bias={65: 1000.0})
    step = engine.prefill([opened(0, PROMPTS[0], params)])[0]
    kv = SequenceKv(KvBoundaryAdapter(MODEL).kv_layout)
    row = KvBoundaryAdapter(MODEL).forward(np.array(PROMPTS[0]), [Span(kv, 0, len(PROMPTS[0]))])[-1]
    expected = row.astype(np.float64) - math.log(sum(math.exp(value) for value in row.tolist()))
    assert step.token == 65
    assert step.logprobs.chosen == pytest.approx(expected[65], abs=1e-9)
    assert [token for token, _ in step.logprobs.top] == np.argsort(-row, kind="stable")[:3].tolist()
    assert step.logprobs.top[0][1] == pytest.approx(expected.max(), abs=1e-9)


def test_logprobs_zero_asks_for_the_chosen_token_alone(engine):
    step = engine.prefill([opened(0, [1], SamplingParams(logprobs=0))])[0]
    assert step.logprobs.top == []
    assert engine.prefill([opened(1, [1])])[0].logprobs is None


def test_bos_opens_a_prompt_and_is_a_token_like_any_other(engine):
    assert solo(engine, [BOS], 4) != solo(engine, [BOS, BOS], 4)
