"""Every answer and every end has its error; both clients have the same face."""

from __future__ import annotations

import inspect

import pytest

import treadle
from treadle import AsyncClient, AsyncSession, Client, Session, errors
from treadle.cli.exits import exit_code
from treadle_shared import AdmissionDecision, AdmissionReason, DoneReason
from treadle_shared.calls import Failure
from treadle_shared.errors import ConfigError, NodeRunningError, TreadleError

REFUSALS = [reason for reason in AdmissionReason if not reason.accepted]


def decision(reason: AdmissionReason) -> AdmissionDecision:
    return AdmissionDecision(
        reason=reason,
        session_id="s",
        budget="queue_depth",
        needed=1,
        available=0,
        limit=4,
        retry_after_s=0.25,
        field="top_k",
        message="no",
    )


@pytest.mark.parametrize("reason", REFUSALS)
def test_every_refusal_is_an_error_that_explains_itself(reason: AdmissionReason) -> None:
    given = decision(reason)
    error = errors.refusal(given, [given, given])
    assert isinstance(error, TreadleError)
    assert error.reason is reason
    assert (error.budget, error.needed, error.available, error.limit) == ("queue_depth", 1, 0, 4)
    assert error.retry_after_s == 0.25
    assert error.decisions == (given, given)
    for part in (reason.value, "queue_depth", "limit 4", "0.25 s"):
        assert part in str(error)


def test_refusals_differ_by_what_the_caller_can_do() -> None:
    kinds = {reason: type(errors.refusal(decision(reason))) for reason in REFUSALS}
    assert kinds[AdmissionReason.REJECTED_QUEUE_FULL] is errors.Overloaded
    assert kinds[AdmissionReason.REJECTED_CONTEXT] is errors.ContextTooLong
    assert kinds[AdmissionReason.REJECTED_DUPLICATE] is errors.DuplicateSession
    assert kinds[AdmissionReason.REJECTED_QUOTA] is errors.QuotaExceeded
    assert kinds[AdmissionReason.REJECTED_DRAINING] is errors.Draining
    assert kinds[AdmissionReason.REJECTED_KV_BUDGET] is errors.BudgetExceeded
    assert kinds[AdmissionReason.REJECTED_SCRATCH_BUDGET] is errors.BudgetExceeded
    assert issubclass(kinds[AdmissionReason.REJECTED_UNAVAILABLE], errors.Unavailable)


def test_a_field_refused_by_the_node_is_an_invalid_request() -> None:
    error = errors.refusal(decision(AdmissionReason.REJECTED_INVALID))
    assert isinstance(error, errors.InvalidRequest)
    assert (error.field, error.problem) == ("top_k", "no")


def test_only_the_ends_that_were_asked_for_are_no_error() -> None:
    ends = {reason: errors.end_error(reason, "s", "why", "text") for reason in DoneReason}
    assert {reason for reason, error in ends.items() if error is None} == {DoneReason.STOP, DoneReason.LENGTH}
    kinds = [type(error) for error in ends.values() if error is not None]
    assert len(set(kinds)) == len(kinds)
    assert all("why" in str(error) and error.text == "text" for error in ends.values() if error is not None)


@pytest.mark.parametrize(
    ("code", "field", "kind"),
    [
        ("invalid", "top_k", errors.InvalidRequest),
        ("malformed", "rid", errors.InvalidRequest),
        ("malformed", "", errors.ProtocolError),
        ("version", "major", errors.VersionMismatch),
        ("forbidden", "", errors.Forbidden),
        ("busy", "tokenizer", errors.Overloaded),
        ("something new", "", errors.ProtocolError),
    ],
)
def test_every_failure_code_has_its_error(code: str, field: str, kind: type[TreadleError]) -> None:
    assert isinstance(errors.failure_error(Failure(rid=1, code=code, field=field, message="m")), kind)


def test_errors_of_the_standard_kinds_can_be_caught_as_such() -> None:
    assert issubclass(errors.CallTimeout, TimeoutError)
    assert issubclass(errors.ForkedClient, RuntimeError)


def test_exit_codes_tell_whose_fault_it_was() -> None:
    codes = {reason: exit_code(errors.refusal(decision(reason))) for reason in REFUSALS}
    assert codes[AdmissionReason.REJECTED_INVALID] == 65
    assert codes[AdmissionReason.REJECTED_CONTEXT] == 65
    assert codes[AdmissionReason.REJECTED_DUPLICATE] == 73
    assert codes[AdmissionReason.REJECTED_QUEUE_FULL] == 75
    assert codes[AdmissionReason.REJECTED_DRAINING] == codes[AdmissionReason.REJECTED_UNAVAILABLE] == 69
    assert exit_code(errors.Unavailable("x")) == 69
    assert exit_code(errors.SessionFailed("s")) == 70
    assert exit_code(errors.DeadlineExceeded("s")) == 75
    assert exit_code(errors.VersionMismatch("x")) == 76
    assert exit_code(errors.Forbidden("x")) == 77
    assert exit_code(ConfigError("k", "p")) == exit_code(NodeRunningError("x")) == 78
    assert all(64 <= code <= 78 for code in codes.values())


def test_the_public_names_are_a_sorted_table_of_contents() -> None:
    assert treadle.__all__ == sorted(treadle.__all__)
    assert all(hasattr(treadle, name) for name in treadle.__all__)
    assert set(errors.__all__) - set(treadle.__all__) == {
        "again",
        "end_error",
        "failure_error",
        "local_overload",
        "refusal",
    }


def _face(kind: type) -> dict[str, list[str]]:
    members = {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}
    return {
        name: list(inspect.signature(member).parameters) if inspect.isfunction(member) else []
        for name, member in members.items()
    }


@pytest.mark.parametrize(("one", "other"), [(Client, AsyncClient), (Session, AsyncSession)])
def test_the_asynchronous_twin_has_the_same_names_and_arguments(one: type, other: type) -> None:
    assert _face(one) == _face(other)
    assert list(inspect.signature(one).parameters)[:2] == list(inspect.signature(other).parameters)[:2]
