"""The client's page is true: its code compiles, its names exist, its tables are complete."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import treadle
from treadle import Client, Session, errors
from treadle._options import CallOptions
from treadle.cli.entry import COMMANDS
from treadle_shared import AdmissionReason, DoneReason

PAGE = (Path(__file__).parents[2] / "docs" / "client.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_example_compiles_and_imports_what_there_is(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module == "treadle":
            assert {alias.name for alias in node.names} <= set(treadle.__all__)


def test_every_error_has_a_row() -> None:
    kinds = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    parts = {"RejectedRequest"}  # an InvalidRequest to its caller
    assert not [name for name in kinds - parts if f"`{name}`" not in PAGE]


def test_every_answer_and_every_failed_end_has_a_row() -> None:
    refusals = [reason.value for reason in AdmissionReason if not reason.accepted]
    ends = [reason.value for reason in DoneReason if errors.end_error(reason, "s")]
    assert not [value for value in refusals + ends if f"`{value}`" not in PAGE]


def test_every_option_and_every_command_is_named() -> None:
    assert not [name for name in CallOptions.__annotations__ if f"`{name}`" not in PAGE and name != "penalty_last_n"]
    assert not [name for name in COMMANDS if f"`treadle {name}" not in PAGE]


@pytest.mark.parametrize(("kind", "name"), [(Client, "client"), (Session, "session")])
def test_every_public_name_is_shown(kind: type, name: str) -> None:
    public = [member for member in dir(kind) if not member.startswith("_") and member != "ended"]
    assert not [member for member in public if f".{member}" not in PAGE]
