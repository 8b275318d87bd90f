"""The seed of draw k depends on (seed, k) alone, and neighbours are unrelated."""

from __future__ import annotations

from itertools import product

from treadle_shared.sampling import SEED_LIMIT, SamplingParams
from treadle_worker.llama.sampler import mix_seed, needs_chain

DRAWS = 512


def test_draws_of_seed_0_are_the_published_outputs_of_splitmix64() -> None:
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [mix_seed(0, draw) for draw in range(3)] == [output >> 32 for output in published]


def test_values_are_seeds_that_llama_cpp_does_not_take_for_random() -> None:
    for seed, draw in product((0, 1, SEED_LIMIT - 2), range(DRAWS)):
        assert 0 <= mix_seed(seed, draw) < SEED_LIMIT - 1


def test_neighbouring_seeds_and_draws_do_not_meet() -> None:
    values = {mix_seed(seed, draw) for seed, draw in product(range(32), range(DRAWS))}
    # 16,384 values in 2^32: the expected number of chance collisions is 0.03
    assert len(values) >= 32 * DRAWS - 2


def test_a_draw_and_its_successor_share_about_half_their_bits() -> None:
    flips = [(mix_seed(5, draw) ^ mix_seed(5, draw + 1)).bit_count() for draw in range(DRAWS)]
    assert 15 < sum(flips) / DRAWS < 17
    assert min(flips) > 2


def test_only_a_draw_or_changed_logits_need_a_chain() -> None:
    assert not needs_chain(SamplingParams())
    assert not needs_chain(SamplingParams(ignore_eos=True))
    assert needs_chain(SamplingParams(temperature=0.5))
    assert needs_chain(SamplingParams(repeat_penalty=1.1))
    assert needs_chain(SamplingParams(logit_bias={3: 1.0}))
