"""Many clients at once: everyone gets their own answer, and load changes no token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from real_node import RealNode

THREADS = 64
WORDS = [f"{'BCDFGHJKLMNPQRST'[n % 16]}{'aeiou'[n // 16]}x{n}" for n in range(THREADS)]


def _prompts() -> list[str]:
    filler = "The quick brown fox jumps over the lazy dog. "
    return [f"{filler * (number % 5)}My code word is {word}. Repeat my code word:" for number, word in enumerate(WORDS)]


def _answer(node: RealNode, prompt: str, max_tokens: int) -> tuple[list[int], str]:
    with node.client() as client:
        session = client.generate(prompt, max_tokens=max_tokens, temperature=0)
        text = session.result()
        return session.tokens, text


def _all_at_once(node: RealNode, prompts: list[str], max_tokens: list[int]) -> list[tuple[list[int], str]]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda job: _answer(node, *job), zip(prompts, max_tokens, strict=True)))


def _check_many(node: RealNode, prompts: list[str], max_tokens: list[int]) -> list[str]:
    together = _all_at_once(node, prompts, max_tokens)
    seen = node.wait_idle()
    assert seen["batch_occupancy_max"] == node.config.max_sessions
    assert seen["done_total"] >= len(prompts)
    alone = [_answer(node, *job) for job in zip(prompts, max_tokens, strict=True)]
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    return [text for _, text in together]


def test_64_clients_of_the_reference_engine_get_the_tokens_they_get_alone(reference_node: RealNode) -> None:
    prompts = [f"{word} " * (1 + number % 7) for number, word in enumerate(WORDS)]
    _check_many(reference_node, prompts, [4 + 5 * (number % 9) for number in range(THREADS)])


@pytest.mark.model
def test_64_clients_of_the_demo_model_get_the_tokens_they_get_alone(llama_node: RealNode) -> None:
    texts = _check_many(llama_node, _prompts(), [6 + number % 13 for number in range(THREADS)])
    for own, text in zip(WORDS, texts, strict=True):
        assert not [word for word in WORDS if word != own and word in text]
    assert sum(own in text for own, text in zip(WORDS, texts, strict=True)) >= THREADS // 2
    assert llama_node.telemetry()["rejected_total"] == 0
