"""The engine that fails on purpose fails as it is told."""

from __future__ import annotations

import pytest

from treadle_shared import DecodeItem, PrefillItem, SamplingParams, load_config
from treadle_shared.errors import ConfigError, DecodeFailed
from treadle_worker.faults import FaultyEngine, parse_faults
from treadle_worker.reference import build_reference_engine


def _engine(rules: str) -> FaultyEngine:
    config = load_config(environ={}, flags={"engine": "reference", "max_sessions": 2, "session_tokens": 64})
    return FaultyEngine(build_reference_engine(config), parse_faults(rules))


def _prefill(engine: FaultyEngine, session: int, *tokens: int) -> None:
    engine.prefill([PrefillItem(session, 0, 0, tokens, True, 0, SamplingParams(ignore_eos=True))])


def test_a_token_marks_its_sequence_for_every_batch_it_is_in() -> None:
    engine = _engine("code-3@token=77")
    _prefill(engine, 0, 1, 2, 3)
    with pytest.raises(DecodeFailed) as failed:
        _prefill(engine, 1, 4, 77)
    assert failed.value.code == -3
    engine.decode_batch([DecodeItem(0, 0, 3)])
    with pytest.raises(DecodeFailed):
        engine.decode_batch([DecodeItem(0, 0, 4), DecodeItem(1, 0, 2)])
    engine.release(1, 0)
    engine.decode_batch([DecodeItem(0, 0, 4)])


def test_calls_are_counted() -> None:
    engine = _engine("code1@every=2;code2@call=3")
    _prefill(engine, 0, 1)
    for code in (1, 2, 1):
        with pytest.raises(DecodeFailed) as failed:
            engine.decode_batch([DecodeItem(0, 0, 1)])
        assert failed.value.code == code


@pytest.mark.parametrize("rules", ["explode@token=1", "kill", "kill@every=0", "code@call=1", "kill@token=-1"])
def test_what_is_no_rule_is_refused(rules: str) -> None:
    with pytest.raises(ConfigError, match="faults"):
        parse_faults(rules)
