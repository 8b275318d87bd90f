"""How outputs are compared, counted and told."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from treadle_shared.engine import TokenLogprobs
from treadle_worker.verify.report import CaseResult, Report
from treadle_worker.verify.steps import Step, Tally, difference
from treadle_worker.verify.table import HEADER, line


def step(*logits: float, token: int | None = 1, logprob: float = -0.5) -> Step:
    return Step(np.array(logits, np.float32), token, TokenLogprobs(logprob, []))


def case(**more: Any) -> CaseResult:
    return CaseResult(**{"name": "a", "prompts": 1, "outputs": 2, "equal": 2, "seconds": 0.1, **more})


def report(*cases: CaseResult, self_test: bool = True, lacks: tuple[str, ...] = ()) -> Report:
    return Report(
        model="m.gguf",
        recipe="r",
        build="b",
        threads=1,
        switches={"unified_kv": False},
        self_test=self_test,
        self_test_detail="logits differ",
        lacks=lacks,
        cases=cases,
    )


def test_equal_outputs_have_no_difference() -> None:
    assert difference(step(1.0, 2.0), step(1.0, 2.0)) == ""


@pytest.mark.parametrize(("mine", "other"), [(1.0, np.nextafter(np.float32(1.0), np.float32(2.0))), (0.0, -0.0)])
def test_one_bit_is_a_difference(mine: float, other: float) -> None:
    assert "1 logits differ" in difference(step(mine, 2.0), step(float(other), 2.0))


def test_a_logit_that_is_no_number_equals_itself() -> None:
    assert difference(step(float("nan")), step(float("nan"))) == ""


def test_a_difference_says_by_how_much_and_which_token_it_chose() -> None:
    found = difference(step(1.0, 2.0), step(1.0, 2.25, token=7))
    assert found == "1 logits differ, by up to 0.25, and 7 was chosen for 1"


def test_equal_logits_do_not_excuse_another_token_or_log_probability() -> None:
    assert "7 was chosen for 1" in difference(step(1.0), step(1.0, token=7))
    assert "log probabilities" in difference(step(1.0), step(1.0, logprob=-0.6))


def test_an_output_without_a_token_is_compared_by_its_logits_alone() -> None:
    assert difference(step(1.0), Step(np.array([1.0], np.float32))) == ""


def test_a_tally_counts_and_keeps_the_first_difference() -> None:
    tally = Tally()
    tally.compare("p", [step(1.0), step(2.0), step(3.0)], [step(1.0), step(2.5), step(4.0)], first_token=4)
    assert (tally.prompts, tally.outputs, tally.equal) == (1, 3, 1)
    assert tally.first == "p, token 5: 1 logits differ, by up to 0.5"


def test_outputs_that_are_missing_are_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Tally().compare("p", [step(1.0), step(2.0)], [step(1.0)])


@pytest.mark.parametrize(
    ("found", "exact"),
    [
        (report(case()), True),
        (report(case(), case(equal=1)), False),
        (report(case(), self_test=False), False),
        (report(case(outputs=0, equal=0)), False),
        (report(case(), case(outputs=0, equal=0, skipped="cannot")), True),
        (report(), False),
    ],
)
def test_exact_needs_every_case_and_the_self_test(found: Report, exact: bool) -> None:
    assert found.exact is exact
    assert found.verdict.startswith("exact:" if exact else "not exact:")
    assert json.loads(json.dumps(found.to_dict()))["exact"] is exact


def test_a_verdict_names_what_is_missing() -> None:
    assert "another build" in report(case(equal=0), lacks=("another build",)).verdict
    assert "logits differ" in report(case(equal=0), self_test=False).verdict


def test_a_line_shows_the_counts_or_why_there_are_none() -> None:
    assert line(case(first="p, token 3: off", equal=1)).endswith("p, token 3: off")
    assert line(case()).split()[:4] == ["a", "1", "2", "2"]
    assert "cannot trim" in line(case(skipped="cannot trim"))
    assert line(case()).index("none") == HEADER.index("first difference")
