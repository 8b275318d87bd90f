"""Engines that park: the reference engine's sequences come back as they were, and marked ones stay marked."""

from __future__ import annotations

import pytest

from treadle_shared.config import make_config
from treadle_shared.engine import DecodeItem, ParkingEngine, PrefillItem
from treadle_shared.errors import DecodeFailed
from treadle_shared.sampling import SamplingParams
from treadle_worker.faults import FaultyEngine, parse_faults
from treadle_worker.reference import build_reference_engine
from treadle_worker.reference.engine import KvBatchEngine

PROMPT = list(range(40, 60))
PARAMS = SamplingParams(temperature=1.0, seed=3, repeat_penalty=1.3, penalty_last_n=8, ignore_eos=True)


def _engine(**settings: object) -> KvBatchEngine:
    return build_reference_engine(
        make_config({"engine": "reference", "max_sessions": 3, "session_tokens": 64, **settings})
    )


def _prefill(engine: ParkingEngine, session: int, epoch: int, tokens: list[int]) -> int | None:
    return engine.prefill([PrefillItem(session, epoch, 0, tokens, True, 0, PARAMS)])[0].token


def _decode(engine: ParkingEngine, session: int, epoch: int, pos: int) -> int | None:
    step = engine.decode_batch([DecodeItem(session, epoch, pos)])[0]
    assert not step.cache_miss
    return step.token


def test_a_sequence_goes_on_after_a_pause_as_without_one() -> None:
    alone, turned = _engine(), _engine()
    expected = [_prefill(alone, 0, 1, PROMPT), *(_decode(alone, 0, 1, 20 + step) for step in range(12))]
    found = [_prefill(turned, 0, 1, PROMPT)]
    session, epoch = 0, 1
    for step in range(12):
        if step % 3 == 1:
            assert turned.park(session, epoch)
            _prefill(turned, session, 90 + step, [7, 8, 9])  # somebody else in its slot
            turned.release(session, 90 + step)
            assert turned.restore(session, epoch, (session + 1) % 3, epoch + 1)
            session, epoch = (session + 1) % 3, epoch + 1
        found.append(_decode(turned, session, epoch, 20 + step))
        turned.check()
    assert found == expected


def test_parked_rows_are_counted_apart_and_forgotten_by_name() -> None:
    engine = _engine()
    per_token = engine.facts.parked_bytes_per_token
    _prefill(engine, 0, 1, PROMPT)
    _prefill(engine, 1, 2, PROMPT[:5])
    assert engine.park(0, 1)
    assert (engine.kv_tokens, engine.parked_bytes) == (5, 20 * per_token)
    assert not engine.park(0, 1), "it is not in its slot any more"
    engine.release(0, 1)
    assert (engine.kv_tokens, engine.parked_bytes) == (5, 0)
    assert not engine.restore(0, 1, 0, 3)
    engine.check()


def test_a_parked_sequence_is_no_victim_of_eviction_but_needs_room_to_return() -> None:
    engine = _engine(kv_bytes=30 * _engine().facts.kv_bytes_per_token)
    _prefill(engine, 0, 1, PROMPT)
    assert engine.park(0, 1)
    _prefill(engine, 1, 2, PROMPT)
    assert engine.restore(0, 1, 0, 3), "the least recently used one makes room"
    assert engine.decode_batch([DecodeItem(1, 2, 20)])[0].cache_miss
    _decode(engine, 0, 3, 20)
    engine.check()


def test_a_marked_sequence_is_still_marked_when_it_comes_back() -> None:
    engine = FaultyEngine(_engine(), parse_faults("code-3@token=77"))
    with pytest.raises(DecodeFailed):
        _prefill(engine, 0, 1, [1, 77])
    inner = _engine()
    engine = FaultyEngine(inner, parse_faults("code-3@token=77"))
    engine._prompts[0, 1] = {77}
    inner.prefill([PrefillItem(0, 1, 0, [1, 77], True, 0, PARAMS)])
    assert engine.park(0, 1)
    assert engine.parked_bytes == inner.parked_bytes > 0
    assert engine.restore(0, 1, 2, 5)
    with pytest.raises(DecodeFailed):
        _decode(engine, 2, 5, 2)
