"""What can be seen of a model's file without loading it."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import pytest
from gguf_files import gguf
from hypothesis import given
from hypothesis import strategies as st

from treadle_shared.errors import ModelError
from treadle_shared.modelfile import check_model, read_model_file

PLAIN = {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "", "bc"]}
WHOLE = gguf(PLAIN, {"one": 10, "two": 8})


def _problem(path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        check_model(path)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


def _file(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def test_a_whole_file_passes_and_tells_its_size_and_its_metadata(tmp_path: Path) -> None:
    path = _file(tmp_path, WHOLE)
    check_model(path)
    found = read_model_file(path)
    assert found.needed_bytes == len(WHOLE)
    assert (found.architecture, found.metadata["llama.block_count"]) == ("llama", 2)


def test_every_cut_is_found(tmp_path: Path) -> None:
    for length in range(len(WHOLE)):
        problem = _problem(_file(tmp_path, WHOLE[:length]))
        assert problem.startswith(("is empty", "is not a GGUF", "the header is damaged or cut short", "is cut short"))


def test_what_is_no_model_file_is_named(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    assert _problem(tmp_path / "none.gguf") == "no such file or directory"
    assert _problem(tmp_path) == "is a directory, not a model file"
    assert _problem(pipe) == "is not a regular file"
    assert _problem(_file(tmp_path, b"")) == "is empty"
    assert _problem(_file(tmp_path, b"Dear reader")) == "is not a GGUF file"
    assert "version 1" in _problem(_file(tmp_path, b"GGUF" + struct.pack("<IQQ", 1, 0, 0)))


@pytest.mark.parametrize(
    "more", [{"bert.pooling_type": 1}, {"bert.attention.causal": False}, {"bert.pooling_type": 2, "x": "y"}]
)
def test_a_model_that_only_embeds_is_refused(tmp_path: Path, more: dict[str, int | bool | str]) -> None:
    path = _file(tmp_path, gguf({"general.architecture": "bert", **more}, {"one": 8}))
    assert _problem(path) == "is an embedding model (bert); it cannot generate text"


def test_a_causal_model_without_pooling_is_none(tmp_path: Path) -> None:
    more = {"bert.pooling_type": 0, "bert.attention.causal": True, "other.pooling_type": 3}
    check_model(_file(tmp_path, gguf({"general.architecture": "bert", **more})))


def test_every_part_of_a_split_model_is_looked_at(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2)]
    parts[0].write_bytes(WHOLE)
    with pytest.raises(ModelError, match=r"00002-of-00002\.gguf: no such file"):
        check_model(parts[0])
    parts[1].write_bytes(WHOLE[:-1])
    with pytest.raises(ModelError, match=r"00002-of-00002\.gguf: is cut short"):
        check_model(parts[0])


@given(at=st.integers(4, len(WHOLE) - 1), data=st.binary(min_size=1, max_size=12))
def test_a_damaged_file_passes_or_is_refused_by_type(
    tmp_path_factory: pytest.TempPathFactory, at: int, data: bytes
) -> None:
    path = _file(tmp_path_factory.getbasetemp(), WHOLE[:at] + data + WHOLE[at + len(data) :])
    with contextlib.suppress(ModelError):  # anything else would be a traceback
        check_model(path)
