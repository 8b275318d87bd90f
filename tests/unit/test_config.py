"""Configuration: precedence, and every absurd value refused with its key named."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_shared.budget import check_serves
from treadle_shared.config import NodeConfig, config_to_toml, load_config, make_config
from treadle_shared.engine import EngineFacts
from treadle_shared.errors import ConfigError

HINTS = get_type_hints(NodeConfig, include_extras=True)
KEYS = [field.name for field in msgspec.structs.fields(NodeConfig)]


def bounds(key: str) -> tuple[type | None, list[msgspec.Meta], tuple[Any, ...]]:
    """A key's plain type (None for a choice), its bounds and its choices, whatever is wrapped around them."""
    hint = HINTS[key]
    metas: list[msgspec.Meta] = []
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            metas += [meta for meta in more if isinstance(meta, msgspec.Meta)]
        elif get_origin(hint) in (Union, UnionType):
            (hint,) = (member for member in get_args(hint) if member is not type(None))
        elif get_origin(hint) is Literal:
            return None, metas, get_args(hint)
        else:
            return hint, metas, ()


def beyond(meta: msgspec.Meta, step: float) -> list[Any]:
    """Values just outside a bound."""
    values: list[Any] = []
    if meta.ge is not None:
        values.append(meta.ge - step)
    if meta.gt is not None:
        values += [meta.gt, meta.gt - step]
    if meta.le is not None:
        values.append(meta.le + step)
    if meta.lt is not None:
        values += [meta.lt, meta.lt + step]
    return values


def bad_values(key: str) -> list[Any]:
    """Values that a key must refuse, from its own bounds and type."""
    kind, metas, choices = bounds(key)
    if choices:
        return ["nonsense", 99, -1, 1.5, [choices[0]]]
    outside = [value for meta in metas for value in beyond(meta, 1)]
    if kind is int:
        return [*outside, "5", 1.5, True, [1], 10**30, -(10**30), math.nan, math.inf]
    if kind is float:
        return [*outside, "5", True, [1.0], math.nan, math.inf, -math.inf, -1.0]
    assert kind is str, f"{key}: a kind of setting that this test does not know"
    patterned = any(meta.pattern for meta in metas)
    return [5, 1.5, True, ["x"], *(["three", "1-", "1,,2"] if patterned else [])]


def good_value(key: str) -> Any:
    """A value that is not the default."""
    kind, metas, choices = bounds(key)
    default = getattr(NodeConfig(), key)
    if choices:
        return next(choice for choice in choices if choice != default)
    if kind is str:
        return "0-3,5" if any(meta.pattern for meta in metas) else "näme"
    least = max((meta.ge if meta.ge is not None else meta.gt for meta in metas), default=0)
    value = (default if default is not None else least) + 1
    return kind(value) if all(meta.le is None or value <= meta.le for meta in metas) else kind(value - 2)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


NEEDS: dict[str, dict[str, Any]] = {"slots": {"kv_policy": "optimistic"}}
"""What must be set beside a key's good value."""

CASES = [pytest.param(key, value, id=f"{key}={value!r}"[:60]) for key in KEYS for value in bad_values(key)]


@pytest.mark.parametrize(("key", "value"), CASES)
def test_an_absurd_value_is_refused_with_its_key_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags={key: value}, environ={})
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}: ")


@pytest.mark.parametrize("key", KEYS)
def test_a_later_source_wins(key: str, tmp_path: Path) -> None:
    default, good = getattr(NodeConfig(), key), good_value(key)
    other = {"heartbeat_s": 0.25, "worker_silence_s": 5.0}.get(key, default)
    file = tmp_path / "node.toml"
    file.write_text(config_to_toml(make_config({key: good, **NEEDS.get(key, {})})))
    name = f"TREADLE_{key.upper()}"

    assert getattr(load_config(file, environ={}), key) == good
    needs = NEEDS.get(key, {})
    assert getattr(load_config(flags=needs, environ={name: as_text(good)}), key) == good
    assert getattr(load_config(flags={key: good, **needs}, environ={}), key) == good
    if other is not None:
        assert getattr(load_config(file, environ={name: as_text(other)}), key) == other
        assert getattr(load_config(environ={name: as_text(good)}, flags={key: other}), key) == other


def test_absent_flags_and_the_place_of_the_node_are_no_settings() -> None:
    environ = {"TREADLE_RUNTIME_DIR": "/x", "TREADLE_CONFIG": "/y", "HOME": "/z"}
    assert load_config(flags={"max_sessions": None}, environ=environ) == NodeConfig()


@pytest.mark.parametrize("key", [key for key in KEYS if getattr(NodeConfig(), key) is None])
def test_an_empty_variable_means_derived(key: str) -> None:
    assert getattr(load_config(environ={f"TREADLE_{key.upper()}": ""}), key) is None


@pytest.mark.parametrize("key", [key for key in KEYS if bounds(key)[0] in (int, float)])
@pytest.mark.parametrize("text", ["many", "nan", "1e999", "0x10", "--3", "5 tokens"])
def test_a_variable_that_is_no_number_is_refused_with_its_key_named(key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={f"TREADLE_{key.upper()}": text})
    assert caught.value.key == key


@pytest.mark.parametrize("value", ["0", "many"])
def test_a_refused_value_is_told_with_where_it_was_set(value: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(f'max_sessions = "{value}"\n')
    with pytest.raises(ConfigError, match=f"^max_sessions: .*; set by {re.escape(str(file))}$"):
        load_config(file, environ={})
    with pytest.raises(ConfigError, match=r"^max_sessions: .*; set by TREADLE_MAX_SESSIONS$"):
        load_config(environ={"TREADLE_MAX_SESSIONS": value})
    with pytest.raises(ConfigError, match=r"^slots: .*; set by TREADLE_SLOTS$"):  # wrong beside another setting only
        load_config(file=None, environ={"TREADLE_SLOTS": "9", "TREADLE_MAX_SESSIONS": "4"})
    with pytest.raises(ConfigError, match=r"^slots: .*; set by TREADLE_slots$"):
        load_config(file=None, environ={"TREADLE_SLOTS": "2", "TREADLE_slots": "9", "TREADLE_MAX_SESSIONS": "4"})
    with pytest.raises(ConfigError) as refused:
        load_config(flags={"max_sessions": 0}, environ={"TREADLE_MAX_SESSIONS": "4"})
    assert "set by" not in str(refused.value)


def test_unknown_keys_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("max_session = 4\n")
    with pytest.raises(ConfigError, match="max_session: is not a known key"):
        load_config(file, environ={})
    with pytest.raises(ConfigError, match="nonsense"):
        load_config(flags={"nonsense": 1}, environ={})
    with pytest.raises(ConfigError, match="TREADLE_MAX_SESSION: "):
        load_config(environ={"TREADLE_MAX_SESSION": "4"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"max_sessions = ", "is not TOML"),
        (b"max_sessions = 1\nmax_sessions = 2\n", "is not TOML"),
        (b"\xff", "is not TOML"),
    ],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "node.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(file, environ={})
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("content", ["[node]\nmax_sessions = 4\n", "max_sessions = 1979-05-27\n", "model = {a = 1}\n"])
def test_toml_of_another_shape_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(content)
    with pytest.raises(ConfigError):
        load_config(file, environ={})


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError) as caught:
            load_config(path, environ={})
        assert caught.value.key == "config"
        assert str(path) in str(caught.value)


def test_keys_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"heartbeat_s": 2.0, "worker_silence_s": 3.0})
    assert caught.value.key == "worker_silence_s"


@settings(deadline=None)
@given(st.text(), st.text(), st.integers(1, (1 << 53) - 1), st.floats(0.001, 3600.0))
def test_a_configuration_comes_back_from_its_toml(model: str, device: str, kv_bytes: int, interval: float) -> None:
    config = NodeConfig(model=model, device=device, kv_bytes=kv_bytes, telemetry_interval_s=interval)
    assert from_toml(config_to_toml(config)) == config


def test_every_key_comes_back_from_toml() -> None:
    config = make_config({key: good_value(key) for key in KEYS})
    assert all(getattr(config, key) != getattr(NodeConfig(), key) for key in KEYS)
    assert from_toml(config_to_toml(config)) == config


def from_toml(text: str) -> NodeConfig:
    return make_config(tomllib.loads(text))


@pytest.mark.parametrize(
    ("settings", "numerics"),
    [
        ({}, "exact"),
        ({"n_gpu_layers": -1}, "fast"),
        ({"n_gpu_layers": 20, "engine": "reference"}, "exact"),
        ({"numerics": "fast"}, "fast"),
        ({"n_gpu_layers": 20, "numerics": "exact"}, "exact"),
    ],
)
def test_numerics_default_to_what_the_device_can_do(settings: dict[str, Any], numerics: str) -> None:
    assert make_config(settings).effective_numerics == numerics


def test_the_default_answer_leaves_room_for_the_prompt() -> None:
    assert make_config({"session_tokens": 64}).effective_max_tokens == 32
    assert NodeConfig().effective_max_tokens == NodeConfig().default_max_tokens


@pytest.mark.parametrize(("key", "value"), [("kv_bytes", 1000), ("scratch_bytes", 10)])
def test_a_budget_that_could_serve_nobody_is_refused_by_name(key: str, value: int) -> None:
    facts = EngineFacts(
        recipe_fingerprint="r",
        n_vocab=10,
        context_tokens=64,
        max_sequences=1,
        kv_bytes_per_token=1536,
        weight_bytes=1,
        scratch_bytes_per_session=100,
    )
    check_serves(load_config(environ={}), facts)
    with pytest.raises(ConfigError, match=key):
        check_serves(load_config(environ={}, flags={key: value}), facts)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_sessions": 8, "slots": 4},
        {"max_sessions": 8, "slots": 9},
        {"max_sessions": 8, "slots": 9, "kv_policy": "optimistic"},
    ],
)
def test_slots_beyond_what_the_policy_can_use_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(settings)
    assert caught.value.key == "slots"


def test_slots_follow_the_sessions_unless_they_are_set() -> None:
    assert make_config({"max_sessions": 5}).effective_slots == 5
    assert make_config({"max_sessions": 5, "slots": 2, "kv_policy": "optimistic"}).effective_slots == 2


@pytest.mark.parametrize(
    ("key", "value", "choices"),
    [
        ("kv_policy", "foo", "reserve, optimistic"),
        ("prefix_sharing", "all", "client, node, off"),
        ("numerics", "both", "exact, fast"),
        ("tick_depth", 3, "1, 2"),
    ],
)
def test_a_wrong_choice_is_told_the_right_ones(key: str, value: object, choices: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config({key: value})
    assert str(refused.value) == f"{key}: must be one of {choices} (given: {value!r})"
    with pytest.raises(ConfigError, match=f"{key}: must be one of {choices}"):
        load_config(environ={f"TREADLE_{key.upper()}": str(value)})
