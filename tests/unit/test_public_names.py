"""The public names are where they are said to be."""

from __future__ import annotations

import importlib

import pytest

HEAVY = {("treadle_worker", "LlamaEngine")}
"""Names that need llama-cpp-python to be had."""

PROMISED = {
    "treadle_shared": {
        "AdmissionDecision",
        "AdmissionReason",
        "BatchEngine",
        "DecodeItem",
        "DoneReason",
        "GenerationRequest",
        "NodeBudget",
        "SchedulerTelemetry",
        "StepResult",
    },
    "treadle_broker": {
        "ConcurrencyResult",
        "ConcurrencySweep",
        "ContinuousBatchScheduler",
        "Scheduler",
        "run_concurrency_sweep",
    },
    "treadle_worker": {"KvBatchEngine", "KvBoundaryAdapter", "SessionCache"},
    "treadle": {
        "AsyncClient",
        "Client",
        "ContextTooLong",
        "DeadlineExceeded",
        "InvalidRequest",
        "Overloaded",
        "Unavailable",
    },
}
PACKAGES = [*PROMISED, "treadle_broker.text", "treadle_worker.reference"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_of_contents_is_sorted_and_public(package: str) -> None:
    names = importlib.import_module(package).__all__
    assert names == sorted(set(names))
    assert not [name for name in names if name.startswith("_")]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_in_the_table_of_contents_can_be_had(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        if (package, name) not in HEAVY:
            assert getattr(module, name) is not None, name


@pytest.mark.parametrize("package", PROMISED)
def test_the_names_the_project_is_known_by_are_public(package: str) -> None:
    assert PROMISED[package] <= set(importlib.import_module(package).__all__)
