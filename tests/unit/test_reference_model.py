"""The reference model's arithmetic, held against a plain float64 Llama without a cache."""

import numpy as np
import pytest

from treadle_shared.bytevocab import N_VOCAB
from treadle_shared.errors import ConfigError
from treadle_worker.reference import KvBoundaryAdapter, ReferenceModel, ReferenceShape
from treadle_worker.reference.adapter import Span
from treadle_worker.reference.arithmetic import blocked, project
from treadle_worker.reference.kv import SequenceKv

TOKENS = np.array([256, 72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100, 0, 255, 257, 9, 9])


def run(adapter, inputs, chunks=None):
    """All rows of one sequence through ``adapter``, in chunks of the given sizes."""
    kv = SequenceKv(adapter.kv_layout)
    kv.reserve(len(inputs))
    rows, start = [], 0
    for count in chunks or [len(inputs)]:
        rows.append(adapter.forward(inputs[start : start + count], [Span(kv, start, count)]))
        start += count
    return np.concatenate(rows)


def dense(blocks):
    return np.concatenate(list(blocks), axis=-1).astype(np.float64)


def norm(rows, gain, eps):
    return rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps) * gain


def turned(heads, shape):
    """Rotary embedding as multiplication of complex numbers; heads (n, n_heads, head_dim)."""
    half = shape.head_dim // 2
    angles = np.arange(len(heads))[:, None, None] * shape.rope_theta ** (-np.arange(half) / half)
    product = (heads[..., :half] + 1j * heads[..., half:]) * np.exp(1j * angles)
    return np.concatenate([product.real, product.imag], axis=-1)


def plain_attention(layer, x, shape):
    n, group = len(x), shape.n_heads // shape.n_kv_heads
    queries = turned((x @ dense(layer.query)).reshape(n, shape.n_heads, -1), shape)
    keys = turned((x @ dense(layer.key)).reshape(n, shape.n_kv_heads, -1), shape).repeat(group, axis=1)
    values = (x @ dense(layer.value)).reshape(n, shape.n_kv_heads, -1).repeat(group, axis=1)
    scores = np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(shape.head_dim)
    weights = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values).reshape(n, -1) @ dense(layer.output)


def plain_llama(model, tokens):
    """Logits of every position from the whole sequence at once."""
    shape = model.shape
    x = model.embedding[tokens].astype(np.float64)
    for layer in model.layers:
        x = x + plain_attention(layer, norm(x, layer.attention_norm, shape.norm_eps), shape)
        fed = norm(x, layer.feed_norm, shape.norm_eps)
        gate = fed @ dense(layer.gate)
        x = x + (gate / (1 + np.exp(-gate)) * (fed @ dense(layer.up))) @ dense(layer.down)
    return norm(x, model.norm, shape.norm_eps) @ dense(model.head)


@pytest.mark.parametrize(
    "shape",
    [
        ReferenceShape(),
        ReferenceShape(tied_head=True),
        ReferenceShape(n_layers=2, d_model=48, n_heads=6, n_kv_heads=3, head_dim=16, d_ff=80),
        ReferenceShape(n_heads=2, n_kv_heads=2),
        ReferenceShape(n_heads=4, n_kv_heads=1),
    ],
    ids=["default", "tied head", "other sizes", "as many kv heads as heads", "one kv head"],
)
def test_cached_rows_equal_a_plain_llama_without_a_cache(shape):
    model = ReferenceModel(shape, seed=7)
    cached = run(KvBoundaryAdapter(model), TOKENS, chunks=[1] * len(TOKENS))
    assert np.allclose(cached, plain_llama(model, TOKENS), rtol=0, atol=2e-5)


def test_default_shape_costs_1536_bytes_of_kv_a_token():
    assert ReferenceShape().kv_bytes_per_token == 1536
    assert KvBoundaryAdapter(ReferenceModel()).kv_bytes_per_token == 1536


def test_kv_cost_is_what_the_arrays_of_a_token_hold():
    adapter = KvBoundaryAdapter(ReferenceModel(), 1, 3)
    kv = SequenceKv(adapter.kv_layout)
    assert (kv.keys.nbytes + kv.values.nbytes) // kv.capacity == adapter.kv_bytes_per_token == 1024


def test_two_half_ranges_chained_give_the_bits_of_the_full_one():
    model = ReferenceModel(seed=1)
    full = run(KvBoundaryAdapter(model), TOKENS)
    for split in (1, 2):
        lower, upper = KvBoundaryAdapter(model, 0, split), KvBoundaryAdapter(model, split)
        hidden = run(lower, TOKENS)
        assert hidden.shape == (len(TOKENS), model.shape.d_model)
        assert np.array_equal(run(upper, hidden), full)


def test_adapter_tells_which_layers_it_runs():
    model = ReferenceModel()
    part, full = KvBoundaryAdapter(model, 1), KvBoundaryAdapter(model)
    assert (part.layer_range, part.n_layers, part.is_full_shard) == ((1, 3), 2, False)
    assert (full.layer_range, full.n_layers, full.is_full_shard) == ((0, 3), 3, True)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (-1, 2), (0, 4), (3, None)])
def test_a_range_outside_the_model_is_refused(first, last):
    with pytest.raises(ConfigError, match="layer_range"):
        KvBoundaryAdapter(ReferenceModel(), first, last)


@pytest.mark.parametrize("chunks", [[17], [1] * 17, [8, 9], [16, 1], [1, 16], [5, 5, 7]])
def test_any_chunking_gives_the_same_bits(chunks):
    adapter = KvBoundaryAdapter(ReferenceModel(seed=3))
    assert np.array_equal(run(adapter, TOKENS, chunks), run(adapter, TOKENS))


def test_bits_survive_the_growth_of_the_kv_arrays():
    adapter = KvBoundaryAdapter(ReferenceModel(seed=3))
    tokens = np.arange(200) % N_VOCAB
    growing, kv, rows = SequenceKv(adapter.kv_layout), SequenceKv(adapter.kv_layout), []
    kv.reserve(len(tokens))
    for position in range(len(tokens)):
        growing.reserve(position + 1)
        rows.append(adapter.forward(tokens[position : position + 1], [Span(growing, position, 1)])[0])
    assert growing.capacity < 2 * len(tokens)
    assert np.array_equal(np.array(rows), adapter.forward(tokens, [Span(kv, 0, len(tokens))]))


def test_only_the_wanted_rows_become_logits():
    adapter = KvBoundaryAdapter(ReferenceModel())
    kv = SequenceKv(adapter.kv_layout)
    full = run(adapter, TOKENS)
    assert np.array_equal(adapter.forward(TOKENS, [Span(kv, 0, len(TOKENS))], [16, 3]), full[[16, 3]])
    assert adapter.forward(TOKENS, [Span(kv, 0, len(TOKENS))], []).shape == (0, N_VOCAB)


def test_a_product_is_cut_into_blocks_that_no_blas_splits_among_threads():
    weights = np.random.default_rng(0).standard_normal((64, N_VOCAB), dtype=np.float32)
    blocks = blocked(weights)
    assert blocks.shape == (2, 64, 129)
    rows = np.random.default_rng(1).standard_normal((5, 64), dtype=np.float32)
    assert np.allclose(project(rows, blocks), rows @ weights, rtol=0, atol=1e-4)


def test_a_product_gives_each_row_the_bits_it_has_alone():
    weights = blocked(np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32))
    rows = np.random.default_rng(1).standard_normal((40, 64), dtype=np.float32)
    together = project(rows, weights)
    for n in (1, 2, 3, 8, 33):
        assert np.array_equal(project(rows[:n], weights), together[:n])


def test_weights_follow_from_shape_and_seed():
    one, same, other = ReferenceModel(seed=5), ReferenceModel(seed=5), ReferenceModel(seed=6)
    assert np.array_equal(run(KvBoundaryAdapter(one), TOKENS), run(KvBoundaryAdapter(same), TOKENS))
    assert not np.array_equal(one.embedding, other.embedding)


def test_fingerprint_tells_apart_seed_shape_and_bits_of_the_probe():
    probe = np.zeros(4, dtype=np.float32)
    name = ReferenceModel(seed=5).fingerprint(probe)
    assert name == ReferenceModel(seed=5).fingerprint(probe)
    assert name != ReferenceModel(seed=6).fingerprint(probe)
    assert name != ReferenceModel(ReferenceShape(d_ff=120), seed=5).fingerprint(probe)
    assert name != ReferenceModel(seed=5).fingerprint(np.nextafter(probe, np.float32(1)))


def test_weight_bytes_count_every_parameter():
    shape = ReferenceShape()
    kv, heads = shape.n_kv_heads * shape.head_dim, shape.n_heads * shape.head_dim
    layer = 2 * shape.d_model + shape.d_model * (2 * heads + 2 * kv + 3 * shape.d_ff)
    parameters = shape.n_layers * layer + shape.d_model + 2 * shape.n_vocab * shape.d_model
    assert ReferenceModel(shape).weight_bytes == 4 * parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_layers", 0), ("d_model", -1), ("n_heads", 3), ("head_dim", 31), ("n_vocab", 257), ("norm_eps", 0.0)],
)
def test_an_absurd_shape_is_refused_by_field(field, value):
    with pytest.raises(ConfigError, match=field):
        ReferenceShape(**{field: value})
