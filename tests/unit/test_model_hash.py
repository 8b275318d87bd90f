"""The digest of a model's files, and the names of a split model's parts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from treadle_shared.modelfile import model_files
from treadle_worker.llama.fingerprint import block_offsets, fingerprint, hash_files

MIB = 1 << 20
GIB = 1 << 30


def test_any_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    content = bytearray(3 * MIB + 17)
    first.write_bytes(content)
    content[2 * MIB + 5] = 1
    second.write_bytes(content)
    assert hash_files([first]) == hash_files([first])
    assert hash_files([first]) != hash_files([second])


def test_the_order_and_number_of_files_count(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"one")
    second.write_bytes(b"two")
    digests = {hash_files(files) for files in ([first], [first, second], [second, first])}
    assert len(digests) == 3


def test_a_file_up_to_a_gibibyte_is_read_whole() -> None:
    assert list(block_offsets(2 * MIB + 1)) == [0, MIB, 2 * MIB]
    assert len(list(block_offsets(GIB))) == 1024
    assert list(block_offsets(0)) == []


def test_a_larger_file_is_sampled_from_end_to_end() -> None:
    offsets = list(block_offsets(70 * GIB + 3))
    assert len(offsets) == 512
    assert offsets == sorted(set(offsets))
    assert offsets[:16] == [block * MIB for block in range(16)]
    assert offsets[-1] == 70 * GIB
    assert max(b - a for a, b in pairwise(offsets)) < 200 * MIB


def test_named_facts_give_one_digest() -> None:
    assert fingerprint([("a", 1)]) == fingerprint([("a", 1)])
    assert fingerprint([("a", 1)]) != fingerprint([("a", 2)])
    assert fingerprint([("a", 1)]) != fingerprint([("b", 1)])


def test_a_split_model_is_all_its_parts() -> None:
    parts = model_files(Path("/m/big-00001-of-00003.gguf"))
    assert [part.name for part in parts] == [f"big-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert model_files(Path("/m/plain.gguf")) == (Path("/m/plain.gguf"),)
