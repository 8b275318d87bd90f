"""What a client reads is the text, whole characters only, and nothing of a stop string."""

from __future__ import annotations

import pytest
from real_node import RealNode

LINE = "👩‍👩‍👧 歪 🇫🇷"


@pytest.mark.model
def test_characters_of_several_tokens_are_never_split(llama_node: RealNode) -> None:
    with llama_node.client() as client:
        session = client.generate((LINE + "\n") * 6, max_tokens=80, ignore_eos=True)
        deltas = list(session)
        assert "\ufffd" not in "".join(deltas)
        assert LINE in "".join(deltas)
        assert "".join(deltas) == session.text
        assert len(session.tokens) == 80


@pytest.mark.model
@pytest.mark.parametrize("stop", ["fox jumps", " jumps ov", "r the lazy d", "x"])
def test_a_stop_string_across_tokens_is_cut_and_never_leaked(llama_node: RealNode, stop: str) -> None:
    with llama_node.client() as client:
        prompt = "The quick brown fox jumps over the lazy dog.\n" * 5
        whole = client.generate(prompt, max_tokens=30, ignore_eos=True).result()
        assert stop in whole
        session = client.generate(prompt, max_tokens=30, ignore_eos=True, stop=[stop])
        deltas = list(session)
        assert "".join(deltas) == whole[: whole.index(stop)]
        assert session.finish_reason == "stop"


@pytest.mark.model
def test_a_stop_string_that_never_comes_takes_nothing_away(llama_node: RealNode) -> None:
    with llama_node.client() as client:
        prompt = "The quick brown fox jumps over the lazy dog.\n" * 5
        whole = client.generate(prompt, max_tokens=12, ignore_eos=True).result()
        held = client.generate(prompt, max_tokens=12, ignore_eos=True, stop=[whole[-3:] + "never"])
        assert held.result() == whole
        assert held.finish_reason == "length"


def test_log_probabilities_come_with_their_tokens(reference_node: RealNode) -> None:
    with reference_node.client() as client:
        session = client.generate("abc", max_tokens=6, ignore_eos=True, logprobs=3)
        session.result()
        assert [entry.token for entry in session.logprobs] == session.tokens
        for entry in session.logprobs:
            assert len(entry.top) == 3
            assert entry.logprob == pytest.approx(entry.top[0][1])


def test_the_told_seed_brings_the_same_answer_again(reference_node: RealNode) -> None:
    with reference_node.client() as client:
        first = client.generate("abc", max_tokens=20, ignore_eos=True, temperature=1.0)
        text = first.result()
        again = client.generate("abc", max_tokens=20, ignore_eos=True, temperature=1.0, seed=first.seed)
        assert again.result() == text
        other = client.generate("abc", max_tokens=20, ignore_eos=True, temperature=1.0, seed=(first.seed or 0) ^ 1)
        assert other.result() != text
