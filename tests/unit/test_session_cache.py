"""The KV state manager: keys, budget, eviction order, accounts."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from treadle_shared.sampling import SamplingParams
from treadle_worker.reference import SessionCache
from treadle_worker.reference.kv import KvLayout
from treadle_worker.reference.sampler import Sampler

LAYOUT = KvLayout(n_layers=1, n_kv_heads=1, head_dim=2)
TOKEN_BYTES = 16


def sampler():
    return Sampler(SamplingParams())


@pytest.fixture
def cache():
    """Room for ten tokens."""
    cache = SessionCache(LAYOUT, 10 * TOKEN_BYTES)
    yield cache
    cache.check()


def put(cache, session, tokens, epoch=0):
    cache.put(session, epoch, sampler())
    return cache.append(session, epoch, tokens)


def test_cached_tokens_are_what_is_charged(cache):
    put(cache, "a", 3)
    put(cache, "b", 4)
    assert cache.append("a", 0, 1)
    assert (cache.tokens, cache.bytes_used) == (8, 8 * TOKEN_BYTES)


def test_an_unknown_session_is_a_miss(cache):
    assert cache.get("a", 0) is None
    assert not cache.append("a", 0, 1)


def test_the_least_recently_used_makes_room(cache):
    for session in ("a", "b", "c"):
        put(cache, session, 3)
    cache.get("a", 0)
    assert put(cache, "d", 2)
    assert cache.get("b", 0) is None
    assert cache.get("a", 0) is not None
    assert cache.evictions == 1


def test_as_many_are_evicted_as_are_needed_and_no_more(cache):
    for session in ("a", "b", "c", "d"):
        put(cache, session, 2)
    assert put(cache, "e", 5)
    assert [cache.get(session, 0) is None for session in "abcde"] == [True, True, False, False, False]


def test_a_growing_session_is_never_its_own_victim(cache):
    put(cache, "a", 4)
    put(cache, "b", 4)
    assert cache.append("a", 0, 5)
    assert cache.get("a", 0).tokens == 9
    assert cache.get("b", 0) is None


def test_what_must_be_kept_is_not_evicted_and_the_one_that_cannot_grow_is_dropped(cache):
    put(cache, "a", 5)
    put(cache, "b", 5)
    assert not cache.append("b", 0, 1, keep=frozenset({("a", 0), ("b", 0)}))
    assert cache.get("a", 0) is not None
    assert cache.get("b", 0) is None
    assert cache.evictions == 1


def test_a_session_over_the_whole_budget_is_dropped_and_the_others_are_spared(cache):
    put(cache, "a", 5)
    assert not put(cache, "b", 11)
    assert cache.get("a", 0) is not None
    assert cache.get("b", 0) is None


def test_a_session_may_fill_the_whole_budget(cache):
    put(cache, "a", 5)
    assert put(cache, "b", 10)
    assert cache.bytes_used == cache.budget_bytes


def test_a_budget_that_is_no_multiple_of_a_token_is_not_exceeded():
    cache = SessionCache(LAYOUT, 3 * TOKEN_BYTES - 1)
    assert put(cache, "a", 2)
    assert not cache.append("a", 0, 1)
    cache.check()


def test_another_epoch_never_sees_the_old_state(cache):
    put(cache, "a", 3, epoch=0)
    assert cache.get("a", 1) is None
    fresh = cache.put("a", 1, sampler())
    assert fresh.tokens == 0
    assert fresh is not cache.get("a", 0)
    cache.release("a", 0)
    assert cache.get("a", 1) is fresh


def test_opening_a_key_again_forgets_what_was_there(cache):
    put(cache, "a", 3)
    assert cache.put("a", 0, sampler()).tokens == 0
    assert cache.tokens == 0


def test_release_gives_everything_back_and_may_be_repeated(cache):
    put(cache, 0, 3)
    put(cache, 1, 3)
    for slot in (0, 1, 1, 2):
        cache.release(slot, 0)
    assert (cache.bytes_used, cache.tokens, len(cache), cache.evictions) == (0, 0, 0, 0)


def test_growth_keeps_the_rows():
    cache = SessionCache(LAYOUT, 1000 * TOKEN_BYTES)
    put(cache, "a", 20)
    kv = cache.get("a", 0).kv
    kv.keys[:, :, :20], kv.values[:, :, :20] = 1.5, 2.5
    cache.append("a", 0, 500)
    assert kv.capacity >= 520
    assert np.all(kv.keys[:, :, :20] == 1.5)
    assert np.all(kv.values[:, :, :20] == 2.5)


def test_check_finds_accounts_that_do_not_add_up():
    cache = SessionCache(LAYOUT, 10 * TOKEN_BYTES)
    put(cache, "a", 3)
    cache.get("a", 0).tokens = 2
    with pytest.raises(AssertionError, match="accounted"):
        cache.check()


KEYS = st.tuples(st.integers(0, 3), st.integers(0, 1))
BUDGET = 12


class CacheMachine(RuleBasedStateMachine):
    """Held against a plain list of (key, tokens), least recently used first."""

    def __init__(self):
        super().__init__()
        self.cache = SessionCache(LAYOUT, BUDGET * TOKEN_BYTES + 3)
        self.model = OrderedDict()
        self.evicted = 0

    @rule(key=KEYS)
    def open(self, key):
        self.cache.put(*key, sampler())
        self.model.pop(key, None)
        self.model[key] = 0

    @rule(key=KEYS)
    def look_up(self, key):
        found = self.cache.get(*key)
        assert (found is None) == (key not in self.model)
        if found is not None:
            assert found.tokens == self.model[key]
            self.model.move_to_end(key)

    @rule(key=KEYS, tokens=st.integers(1, 15), keep=st.frozensets(KEYS, max_size=3))
    def grow(self, key, tokens, keep):
        grown = self.cache.append(*key, tokens, keep=keep)
        assert grown == self._grown(key, tokens, keep)

    @rule(key=KEYS)
    def drop(self, key):
        self.cache.release(*key)
        self.model.pop(key, None)

    def _grown(self, key, tokens, keep):
        if key not in self.model:
            return False
        self.model.move_to_end(key)
        fixed = sum(held for other, held in self.model.items() if other in keep or other == key)
        if fixed + tokens > BUDGET:
            del self.model[key]
            self.evicted += 1
            return False
        while sum(self.model.values()) + tokens > BUDGET:
            victim = next(k for k, held in self.model.items() if held and k not in keep and k != key)
            del self.model[victim]
            self.evicted += 1
        self.model[key] += tokens
        return True

    @invariant()
    def accounts_agree(self):
        self.cache.check()
        assert self.cache.tokens == sum(self.model.values())
        assert self.cache.bytes_used <= self.cache.budget_bytes
        assert len(self.cache) == len(self.model)
        assert self.cache.evictions == self.evicted


TestCacheMachine = CacheMachine.TestCase
