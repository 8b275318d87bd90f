"""A resumed session of another recipe ends for that reason, whatever else of it would not fit here."""

from __future__ import annotations

from array import array

from treadle_broker.submissions import without_foreign_tokens
from treadle_shared.calls import Request, Submit
from treadle_shared.sampling import SamplingParams
from treadle_shared.tokens import pack_tokens, unpack_tokens

HELD = pack_tokens(array("i", [49_000, 7]))


def resumed(recipe: str) -> Request:
    return Request(
        prompt="a long prompt",
        max_tokens=100_000,
        params=SamplingParams(seed=3, logit_bias={49_000: 1.0}),
        stop=["x"],
        session_id="s",
        key=bytes(16),
        emitted=HELD,
        recipe=recipe,
    )


def test_nothing_of_another_model_is_left_but_who_asks_and_what_recipe_it_had() -> None:
    (request,) = without_foreign_tokens(Submit(rid=1, requests=[resumed("theirs")]), "ours").requests
    assert (request.session_id, request.key, request.recipe) == ("s", bytes(16), "theirs")
    assert request.prompt is None
    assert request.emitted is not None
    assert request.tokens is not None
    assert list(unpack_tokens(request.tokens)) == list(unpack_tokens(request.emitted)) == [0]
    assert (request.max_tokens, request.params, request.stop) == (2, SamplingParams(seed=3), [])


def test_a_session_of_this_recipe_or_an_unknown_one_is_left_as_it_is() -> None:
    for mine, ours in (("ours", "ours"), ("", "ours"), ("theirs", "")):
        call = Submit(rid=1, requests=[resumed(mine)])
        assert without_foreign_tokens(call, ours) == call


def test_a_new_request_is_left_as_it_is() -> None:
    call = Submit(rid=1, requests=[Request(prompt="x", recipe="theirs")])
    assert without_foreign_tokens(call, "ours") is call
