"""The llama.cpp engine on the demo model: isolation, exactness, draws, and files that cannot be served."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_shared.config import make_config
from treadle_shared.engine import BatchEngine, DecodeItem, PrefillItem, StepResult, TokenLogprobs
from treadle_shared.errors import ConfigError, DecodeFailed, ModelError, WeightBudgetError
from treadle_shared.sampling import SamplingParams
from treadle_worker import LlamaEngine

pytestmark = pytest.mark.model

SESSIONS = 4
CONTEXT = 256
UBATCH = 64
GREEDY = SamplingParams(logprobs=20)
SAMPLED = SamplingParams(temperature=1.0, top_k=0, seed=11, logprobs=20)
PENALISED = SamplingParams(repeat_penalty=1.3, presence_penalty=0.2, penalty_last_n=20, logprobs=5)
BIASED = SamplingParams(temperature=0.7, seed=3, logit_bias={198: -5.0, 1_000_000: 5.0}, ignore_eos=True, logprobs=5)
EVERY_CHOICE = (GREEDY, SAMPLED, PENALISED, BIASED)

# What a step shows of the logits: the chosen token and float64 functions of all bits of the row.
Trace = list[tuple[int | None, TokenLogprobs | None]]


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[LlamaEngine]:
    opened = LlamaEngine(make_config(settings(model_path)))
    yield opened
    assert opened.kv_tokens == 0
    opened.close()


@pytest.fixture(scope="module")
def by_role(model_path: Path) -> Iterator[LlamaEngine]:
    """With keys and values of one float type: exact by keeping prompt tokens and emitted ones apart."""
    opened = LlamaEngine(make_config(settings(model_path, kv_type="f16")))
    yield opened
    assert opened.kv_tokens == 0
    opened.close()


def settings(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "max_sessions": SESSIONS,
        "session_tokens": CONTEXT,
        "ubatch_tokens": UBATCH,
        "numerics": "exact",
        "cache_slots": 0,
        "threads": 1,  # as exact as any number, and far less slowed by whatever else runs here
        **more,
    }


def prompts() -> list[list[int]]:
    random = np.random.default_rng(42)
    return [random.integers(100, 40_000, length).tolist() for length in (33, 1, 7, UBATCH + 1)]


def shown(step: StepResult) -> tuple[int | None, TokenLogprobs | None]:
    assert not step.cache_miss
    return step.token, step.logprobs


def alone(
    engine: BatchEngine, prompt: Sequence[int], params: SamplingParams, steps: int, chunks: Sequence[int] = ()
) -> Trace:
    """One sequence with nothing beside it, its prompt in the given chunks."""
    start, trace = 0, []
    for size in chunks or [len(prompt)]:
        last = start + size == len(prompt)
        item = PrefillItem(0, 1, start, prompt[start : start + size], last, 0, params if start == 0 else None)
        trace = [shown(step) for step in engine.prefill([item])]
        start += size
    for step in range(steps):
        trace.append(shown(engine.decode_batch([DecodeItem(0, 1, len(prompt) + step)])[0]))
    engine.release(0, 1)
    return trace


def together(engine: BatchEngine, batch: list[list[int]], params: Sequence[SamplingParams], steps: int) -> list[Trace]:
    """One sequence a slot, all in every call."""
    first = engine.prefill(
        [PrefillItem(slot, 9, 0, prompt, True, 0, params[slot]) for slot, prompt in enumerate(batch)]
    )
    traces = [[shown(step)] for step in first]
    for number in range(steps):
        items = [DecodeItem(slot, 9, len(prompt) + number) for slot, prompt in enumerate(batch)]
        for trace, step in zip(traces, engine.decode_batch(items), strict=True):
            trace.append(shown(step))
    for slot in range(len(batch)):
        engine.release(slot, 9)
    return traces


# ---- isolation and exactness


@pytest.mark.parametrize("params", EVERY_CHOICE)
def test_a_batch_of_four_equals_each_sequence_alone_bit_by_bit(engine: LlamaEngine, params: SamplingParams) -> None:
    batch = prompts()
    assert together(engine, batch, [params] * 4, 6) == [alone(engine, prompt, params, 6) for prompt in batch]


def test_sequences_of_one_batch_choose_in_different_ways(engine: LlamaEngine) -> None:
    batch = prompts()
    expected = [alone(engine, prompt, params, 6) for prompt, params in zip(batch, EVERY_CHOICE, strict=True)]
    assert together(engine, batch, EVERY_CHOICE, 6) == expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_batch_of_four_equals_each_sequence_alone_where_roles_are_kept(
    by_role: LlamaEngine, params: SamplingParams
) -> None:
    batch = prompts()
    assert together(by_role, batch, [params] * 4, 6) == [alone(by_role, prompt, params, 6) for prompt in batch]


@pytest.mark.parametrize("chunks", [(2, 31), (20, 13), (3, 2, 28), (1, 32), (32, 1), (1,) * 33])
def test_chunks_do_not_change_a_bit(engine: LlamaEngine, chunks: tuple[int, ...]) -> None:
    prompt = prompts()[0]
    assert alone(engine, prompt, GREEDY, 3, chunks) == alone(engine, prompt, GREEDY, 3)


def test_where_roles_are_kept_a_prompt_one_longer_than_the_micro_batch_leaves_no_lone_row(
    by_role: LlamaEngine,
) -> None:
    prompt = prompts()[3]
    assert alone(by_role, prompt, GREEDY, 3) == alone(by_role, prompt, GREEDY, 3, (40, UBATCH + 1 - 40))


def test_where_roles_are_kept_a_lone_row_of_a_longer_prompt_is_refused(by_role: LlamaEngine) -> None:
    by_role.prefill([PrefillItem(0, 1, 0, [5, 6], False, 0, GREEDY)])
    with pytest.raises(DecodeFailed, match="lone row"):
        by_role.prefill([PrefillItem(0, 1, 2, [7], True)])
    by_role.release(0, 1)


def test_rows_given_out_of_slot_order_come_back_in_the_given_order(engine: LlamaEngine) -> None:
    batch = prompts()
    engine.prefill([PrefillItem(slot, 9, 0, prompt, True, 0, GREEDY) for slot, prompt in enumerate(batch)])
    order = [2, 0, 3, 1]
    steps = engine.decode_batch([DecodeItem(slot, 9, len(batch[slot])) for slot in order])
    assert [step.session for step in steps] == order
    for slot in range(4):
        engine.release(slot, 9)
    assert [shown(step) for step in steps] == [alone(engine, batch[slot], GREEDY, 1)[1] for slot in order]


def test_threads_do_not_change_a_bit(engine: LlamaEngine, model_path: Path) -> None:
    """With two threads the model computes, and the four draws of a tick run, side by side."""
    other = LlamaEngine(make_config(settings(model_path, threads=2)))
    try:
        assert together(other, prompts(), [SAMPLED] * 4, 4) == together(engine, prompts(), [SAMPLED] * 4, 4)
    finally:
        other.close()


def test_the_self_test_finds_the_demo_model_exact(engine: LlamaEngine) -> None:
    assert engine.facts.exact
    assert "bit by bit" in engine.exact_detail
    assert engine.facts.min_prefill_rows == 1
    assert not engine.facts.replay_decode


def test_keys_and_values_of_one_float_type_are_exact_by_role(by_role: LlamaEngine) -> None:
    assert by_role.facts.exact
    assert by_role.facts.min_prefill_rows == 2
    assert by_role.facts.replay_decode


def test_fast_numerics_promise_nothing_and_serve_all_the_same(model_path: Path) -> None:
    fast = LlamaEngine(make_config(settings(model_path, numerics="fast")))
    try:
        assert not fast.facts.exact
        assert fast.facts.min_prefill_rows == 1
        assert not fast.facts.replay_decode
        traces = together(fast, prompts(), [GREEDY] * 4, 3)
        assert all(token is not None for trace in traces for token, _ in trace)
        assert fast.kv_tokens == 0
    finally:
        fast.close()


# ---- rebuilding


@pytest.mark.parametrize("params", EVERY_CHOICE)
def test_a_prefill_rebuilds_a_sequence_and_its_draws_go_on(engine: LlamaEngine, params: SamplingParams) -> None:
    prompt, steps, kept = prompts()[0], 9, 4
    whole = alone(engine, prompt, params, steps)
    tokens = [*prompt, *(token or 0 for token, _ in whole[:kept])]
    trace = [shown(step) for step in engine.prefill([PrefillItem(2, 5, 0, tokens, True, kept, params)])]
    for number in range(kept, steps):
        trace.append(shown(engine.decode_batch([DecodeItem(2, 5, len(prompt) + number)])[0]))
    engine.release(2, 5)
    assert trace == whole[kept:]


@pytest.mark.parametrize("params", EVERY_CHOICE)
def test_forced_rows_rebuild_a_sequence_and_its_draws_go_on(by_role: LlamaEngine, params: SamplingParams) -> None:
    prompt, steps, kept = prompts()[0], 9, 4
    whole = alone(by_role, prompt, params, steps)
    emitted = [token for token, _ in whole]
    by_role.prefill([PrefillItem(2, 5, 0, prompt, False, 0, params)])
    for number in range(kept):
        item = DecodeItem(2, 5, len(prompt) + number, emitted[number], sample=number == kept - 1)
        trace = [shown(by_role.decode_batch([item])[0])]
    for number in range(kept, steps):
        trace.append(shown(by_role.decode_batch([DecodeItem(2, 5, len(prompt) + number)])[0]))
    by_role.release(2, 5)
    assert trace == whole[kept:]


def test_rows_without_a_sample_yield_nothing(engine: LlamaEngine) -> None:
    [step] = engine.prefill([PrefillItem(0, 1, 0, [5, 6, 7], False, 0, GREEDY)])
    assert (step.token, step.cache_miss) == (None, False)
    [step] = engine.decode_batch([DecodeItem(0, 1, 3, 8, sample=False)])
    assert (step.token, step.cache_miss) == (None, False)
    assert engine.kv_tokens == 4
    engine.release(0, 1)


def test_emitted_tokens_in_a_prefill_move_the_draw_on(engine: LlamaEngine) -> None:
    def draws(n_emitted: int) -> list[int | None]:
        found = []
        for seed in range(8):
            params = SamplingParams(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
            [step] = engine.prefill([PrefillItem(0, 1, 0, [5, 6, 7], True, n_emitted, params)])
            found.append(step.token)
            engine.release(0, 1)
        return found

    assert draws(0) == draws(0)
    assert draws(2) != draws(0)


def test_another_seed_gives_another_text(engine: LlamaEngine) -> None:
    prompt = prompts()[0]
    first, second = (alone(engine, prompt, SamplingParams(temperature=1.5, seed=seed), 8) for seed in (1, 2))
    assert first != second


# ---- choosing


def test_an_end_token_is_marked_and_ignore_eos_masks_it(engine: LlamaEngine) -> None:
    end = 2  # <|im_end|>
    pushed = {end: 1e6}
    for temperature in (0.0, 1.0):
        [step] = engine.prefill(
            [
                PrefillItem(
                    0, 1, 0, [5, 6, 7], True, 0, SamplingParams(temperature=temperature, seed=1, logit_bias=pushed)
                )
            ]
        )
        assert (step.token, step.eog) == (end, True)
        engine.release(0, 1)
        masked = SamplingParams(temperature=temperature, seed=1, logit_bias=pushed, ignore_eos=True)
        [step] = engine.prefill([PrefillItem(0, 1, 0, [5, 6, 7], True, 0, masked)])
        assert step.token != end
        assert not step.eog
        engine.release(0, 1)


def test_logprobs_are_a_distribution_and_greedy_takes_its_top(engine: LlamaEngine) -> None:
    for token, logprobs in alone(engine, prompts()[0], GREEDY, 4):
        assert logprobs is not None
        values = [value for _, value in logprobs.top]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert 0.0 < sum(math.exp(value) for value in values) <= 1.0 + 1e-9
        assert (token, logprobs.chosen) == logprobs.top[0]


def test_top_k_of_one_is_greedy(engine: LlamaEngine) -> None:
    prompt = prompts()[0]
    narrow = SamplingParams(temperature=1.0, top_k=1, seed=5, logprobs=20)
    assert alone(engine, prompt, narrow, 5) == alone(engine, prompt, GREEDY, 5)


def test_a_tiny_temperature_is_greedy(engine: LlamaEngine) -> None:
    prompt = prompts()[0]
    cold = SamplingParams(temperature=1e-38, seed=5, logprobs=20)
    assert alone(engine, prompt, cold, 5) == alone(engine, prompt, GREEDY, 5)


def test_penalties_look_at_prompt_and_answer(engine: LlamaEngine) -> None:
    prompt = [198] * 10
    free = [token for token, _ in alone(engine, prompt, SamplingParams(), 40)]
    held = [token for token, _ in alone(engine, prompt, SamplingParams(frequency_penalty=50.0), 40)]
    assert len(set(held)) == len(held)
    assert 198 not in held
    assert len(set(free)) < len(free)


# ---- bookkeeping


def test_release_gives_every_row_back_and_unknown_ones_are_no_error(engine: LlamaEngine) -> None:
    engine.prefill([PrefillItem(slot, 3, 0, [7] * 10, True, 0, GREEDY) for slot in range(4)])
    engine.decode_batch([DecodeItem(slot, 3, 10) for slot in (0, 2)])
    assert engine.kv_tokens == 42
    engine.release(1, 99)
    engine.release(77, 0)
    assert engine.kv_tokens == 42
    for slot in range(4):
        engine.release(slot, 3)
    assert engine.kv_tokens == 0


def test_an_unknown_sequence_is_a_miss_and_its_neighbour_runs(engine: LlamaEngine) -> None:
    engine.prefill([PrefillItem(0, 3, 0, [7, 8], True, 0, GREEDY)])
    ran, missed, other_epoch = engine.decode_batch([DecodeItem(0, 3, 2), DecodeItem(1, 3, 2), DecodeItem(0, 4, 2)])
    assert ran.token is not None
    assert missed.cache_miss
    assert other_epoch.cache_miss
    assert engine.prefill([PrefillItem(3, 1, 5, [7, 8], True)])[0].cache_miss
    engine.release(0, 3)


def test_a_context_that_overflows_is_an_error_and_not_a_crash(engine: LlamaEngine) -> None:
    whole = engine.facts.context_tokens
    engine.prefill([PrefillItem(0, 1, 0, [7] * whole, True, 0, GREEDY)])
    with pytest.raises(DecodeFailed) as failure:
        engine.decode_batch([DecodeItem(0, 1, whole)])
    assert failure.value.code == 1
    assert engine.kv_tokens == whole
    engine.release(0, 1)
    assert engine.kv_tokens == 0
    assert alone(engine, [5, 6, 7], GREEDY, 2) == alone(engine, [5, 6, 7], GREEDY, 2)


def test_a_token_outside_the_vocabulary_is_an_error_and_not_a_crash(engine: LlamaEngine) -> None:
    engine.prefill([PrefillItem(0, 1, 0, [7, 8], True, 0, GREEDY)])
    with pytest.raises(DecodeFailed) as failure:
        engine.decode_batch([DecodeItem(0, 1, 2, engine.facts.n_vocab)])
    assert failure.value.code == -1
    assert engine.kv_tokens == 2
    engine.release(0, 1)


def test_facts_are_measured(engine: LlamaEngine) -> None:
    facts = engine.facts
    assert isinstance(engine, BatchEngine)
    assert facts.kv_bytes_per_token == 30 * 3 * 2 * 64 * 2  # layers, KV heads, K and V, head size, bytes of f16
    assert 90_000_000 < facts.weight_bytes < 98_362_432
    assert (facts.n_vocab, facts.context_tokens, facts.max_sequences) == (49_152, CONTEXT, SESSIONS)
    assert facts.scratch_bytes_per_session > 4 * facts.n_vocab
    assert facts.prefill_tokens_per_s > 0
    assert facts.decode_tick_s > 0
    engine.decode_batch([])
    assert engine.last_timings == (0.0, 0.0)
    alone(engine, [5, 6, 7], GREEDY, 1)
    assert all(seconds > 0 for seconds in engine.last_timings)


def test_the_recipe_names_what_changes_tokens(engine: LlamaEngine, model_path: Path) -> None:
    def recipe(**more: Any) -> tuple[str, str]:
        other = LlamaEngine(make_config(settings(model_path, max_sessions=1, session_tokens=256, **more)))
        other.close()
        return other.recipe_fingerprint, other.facts.tokenizer_fingerprint

    mine = (engine.recipe_fingerprint, engine.facts.tokenizer_fingerprint)
    assert recipe(threads=2) == mine
    assert recipe(kv_type="f32") != mine
    assert recipe(kv_type="f32")[1] == mine[1]


# ---- models that cannot be served


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"Dear reader,\n" * 1000, "is not a GGUF file"),
        (b"GG", "is not a GGUF file"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, "header is damaged"),
    ],
)
def test_a_file_that_is_no_model_is_named_in_one_line(tmp_path: Path, content: bytes | None, problem: str) -> None:
    file = tmp_path / "model.gguf"
    if content is not None:
        file.write_bytes(content)
    _refused(file, problem)


def test_a_directory_is_no_model(tmp_path: Path) -> None:
    _refused(tmp_path, "is a directory")


@pytest.mark.parametrize("share", [0.001, 0.5, 0.999])
def test_a_model_cut_short_is_named_in_one_line(tmp_path: Path, model_path: Path, share: float) -> None:
    file = tmp_path / "model.gguf"
    whole = model_path.stat().st_size
    with model_path.open("rb") as source:
        file.write_bytes(source.read(int(whole * share)))
    _refused(file, "cut short")


def test_an_embedding_model_is_refused(tmp_path: Path, model_path: Path) -> None:
    from llama_cpp import llama_cpp as api

    file = tmp_path / "embedding.gguf"
    overrides = (api.llama_model_kv_override * 2)()
    overrides[0].tag = api.LLAMA_KV_OVERRIDE_TYPE_INT
    overrides[0].key = b"llama.pooling_type"
    overrides[0].value.val_i64 = api.LLAMA_POOLING_TYPE_MEAN
    params = api.llama_model_quantize_default_params()
    params.only_copy = True
    params.kv_overrides = overrides
    assert api.llama_model_quantize(str(model_path).encode(), str(file).encode(), ctypes.byref(params)) == 0
    _refused(file, "is an embedding model")


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"n_gpu_layers": 5}, "n_gpu_layers"),
        ({"device": "no such device"}, "device"),
        ({"model": ""}, "model"),
    ],
)
def test_a_setting_that_this_build_cannot_serve_is_named(model_path: Path, more: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        LlamaEngine(make_config(settings(model_path) | more))
    assert refusal.value.key == key


def test_weights_over_their_budget_are_refused_before_they_are_loaded(model_path: Path) -> None:
    loaded: list[float] = []
    with pytest.raises(WeightBudgetError) as refusal:
        LlamaEngine(make_config(settings(model_path, weight_bytes=50_000_000)), on_progress=loaded.append)
    assert refusal.value.limit == 50_000_000
    assert loaded == []


def test_progress_and_phases_are_told(model_path: Path) -> None:
    fractions: list[float] = []
    phases: list[str] = []
    config = make_config(settings(model_path, max_sessions=1, session_tokens=256))
    LlamaEngine(config, on_progress=fractions.append, on_phase=phases.append).close()
    assert phases == ["loading", "testing"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


QUANTISED = """
import ctypes, json, sys
from treadle_shared.config import make_config
from treadle_worker import LlamaEngine
from treadle_worker.llama.library import load_library
source, folder = sys.argv[1:]
api = load_library(True).api
found = {}
for name, ftype in (("q4_k_m", api.LLAMA_FTYPE_MOSTLY_Q4_K_M), ("f16", api.LLAMA_FTYPE_MOSTLY_F16)):
    params = api.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = ftype, True
    target = f"{folder}/{name}.gguf"
    assert api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)) == 0
    engine = LlamaEngine(make_config({"model": target, "session_tokens": 256, "numerics": "exact", "threads": 1}))
    found[name] = [engine.facts.exact, engine.exact_detail]
    engine.close()
print(json.dumps(found))
"""


def test_k_quants_are_made_exact_and_what_is_not_exact_is_not_called_so(tmp_path: Path, model_path: Path) -> None:
    """In a process of its own: the library reads its kernel switches once."""
    command = [sys.executable, "-c", QUANTISED, str(model_path), str(tmp_path)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=240).stdout)
    assert found["q4_k_m"][0], found
    exact, detail = found["f16"]
    assert exact == ("bit by bit" in detail)
    if not exact:  # a build without tinyBLAS runs F16 exactly too
        assert "differ by up to" in detail


def _refused(file: Path, problem: str) -> None:
    with pytest.raises(ModelError) as refusal:
        LlamaEngine(make_config(settings(file)))
    message = str(refusal.value)
    assert message.startswith(f"{file}: ")
    assert problem in message
    assert "\n" not in message
