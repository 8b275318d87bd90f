"""Which kernels a model runs with, by the types of its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from treadle_worker.llama.kv_types import KvTypes, choose_kv_types
from treadle_worker.llama.switches import choose_switches, obstacles

F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, IQ4_NL, IQ4_XS = 0, 1, 2, 3, 8, 12, 14, 20, 23
LEGACY = [frozenset({Q4_0, Q8_0}), frozenset({Q4_1, Q8_0}), frozenset({Q8_0})]
AUTO, F16S = KvTypes("bf16", "f16"), KvTypes("f16", "f16")
K_AND_I = [frozenset({Q4_K, Q6_K}), frozenset({Q8_0, Q6_K}), frozenset({IQ4_XS, Q8_0})]


@pytest.mark.parametrize("types", [*LEGACY, *K_AND_I, frozenset({F16})])
def test_exact_numerics_have_neither_a_unified_cache_nor_tiles(types: frozenset[int]) -> None:
    switches = choose_switches(True, types, AUTO)
    assert (switches.unified_kv, switches.tiled_kernels) == (False, False)


@pytest.mark.parametrize(
    ("kv_type", "row_by_row"),
    [("auto", True), ("bf16", True), ("q8_0", True), ("q4_0", True), ("f16", False), ("f32", False)],
)
def test_exact_numerics_have_flash_attention_where_it_goes_row_by_row(kv_type: str, row_by_row: bool) -> None:
    kv_types = choose_kv_types(True, kv_type, offloaded=False)
    switches = choose_switches(True, LEGACY[0], kv_types)
    assert switches.flash_attention is row_by_row
    assert obstacles(switches, LEGACY[0], kv_types, tiny_blas=True) == []


def test_keys_and_values_differ_only_for_exact_numerics_on_a_cpu() -> None:
    assert choose_kv_types(True, "auto", offloaded=False) == AUTO
    assert choose_kv_types(True, "auto", offloaded=True) == F16S
    assert choose_kv_types(False, "auto", offloaded=False) == F16S


def test_flash_attention_in_blocks_is_named() -> None:
    switches = replace(choose_switches(True, LEGACY[0], F16S), flash_attention=True)
    [problem] = obstacles(switches, LEGACY[0], F16S, tiny_blas=False)
    assert "flash attention sums a KV cache of f16 in blocks" in problem


@pytest.mark.parametrize("types", LEGACY)
def test_weights_whose_repacked_kernels_are_exact_stay_repacked(types: frozenset[int]) -> None:
    assert choose_switches(True, types, AUTO).repacked_weights
    assert obstacles(choose_switches(True, types, AUTO), types, AUTO, tiny_blas=True) == []


@pytest.mark.parametrize("types", K_AND_I)
def test_k_and_i_quants_are_not_repacked_and_then_nothing_is_in_their_way(types: frozenset[int]) -> None:
    assert not choose_switches(True, types, AUTO).repacked_weights
    assert obstacles(choose_switches(True, types, AUTO), types, AUTO, tiny_blas=True) == []


@pytest.mark.parametrize("types", [*LEGACY, *K_AND_I])
def test_fast_numerics_turn_no_kernel_off(types: frozenset[int]) -> None:
    switches = choose_switches(False, types, F16S)
    assert switches.flash_attention
    assert switches.tiled_kernels
    assert switches.repacked_weights


@pytest.mark.parametrize(
    ("switch", "types", "named"),
    [
        ("unified_kv", LEGACY[0], "unified"),
        ("tiled_kernels", K_AND_I[0], "tiled kernel"),
        ("repacked_weights", K_AND_I[0], "repacked"),
    ],
)
def test_a_switch_that_is_left_on_is_named(switch: str, types: frozenset[int], named: str) -> None:
    switches = replace(choose_switches(True, types, AUTO), **{switch: True})
    [problem] = obstacles(switches, types, AUTO, tiny_blas=False)
    assert named in problem


@pytest.mark.parametrize("switch", ["tiled_kernels", "repacked_weights"])
def test_a_kernel_that_serves_none_of_the_weights_is_in_nobodys_way(switch: str) -> None:
    assert (
        obstacles(replace(choose_switches(True, LEGACY[0], AUTO), **{switch: True}), LEGACY[0], AUTO, tiny_blas=True)
        == []
    )


@pytest.mark.parametrize(("number", "name"), [(F32, "F32"), (F16, "F16"), (30, "BF16")])
def test_float_weights_name_the_build_that_they_need(number: int, name: str) -> None:
    types = frozenset({number, Q8_0})
    [problem] = obstacles(choose_switches(True, types, AUTO), types, AUTO, tiny_blas=True)
    assert problem.startswith(f"{name} weights")
    assert "-DGGML_LLAMAFILE=OFF" in problem
    assert obstacles(choose_switches(True, types, AUTO), types, AUTO, tiny_blas=False) == []


def test_iq4_nl_is_exact_repacked_and_not_beside_k_quants() -> None:
    alone, beside = frozenset({IQ4_NL, Q8_0}), frozenset({IQ4_NL, Q6_K})
    assert obstacles(choose_switches(True, alone, AUTO), alone, AUTO, tiny_blas=True) == []
    [problem] = obstacles(choose_switches(True, beside, AUTO), beside, AUTO, tiny_blas=True)
    assert problem.startswith("IQ4_NL")
