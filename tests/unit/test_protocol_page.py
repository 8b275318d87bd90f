"""The protocol page says what the code does."""

from __future__ import annotations

import re

import msgspec
import protocol_tables
import pytest
import wire_samples

from treadle_shared import limits
from treadle_shared.admission import AdmissionReason
from treadle_shared.outcome import DoneReason

PAGE = protocol_tables.PAGE.read_text()
STRUCTS = protocol_tables.structs()
HEADINGS = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)


def test_the_page_is_of_the_protocols_version() -> None:
    assert HEADINGS[0] == f"The wire protocol, version {limits.PROTOCOL_MAJOR}.{limits.PROTOCOL_MINOR}"


def test_every_type_on_the_wire_has_its_table_and_no_other() -> None:
    assert set(protocol_tables.tables_in(PAGE)) == set(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_a_table_is_what_the_type_says(name: str) -> None:
    """Run ``python tests/unit/protocol_tables.py`` after a change of the types."""
    assert protocol_tables.tables_in(PAGE)[name] == protocol_tables.table(STRUCTS[name])


@pytest.mark.parametrize("struct", STRUCTS.values(), ids=STRUCTS.keys())
def test_every_field_name_is_on_the_page(struct: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(struct):
        assert f"`{field.encode_name}`" in PAGE, field.encode_name


@pytest.mark.parametrize("message_type", wire_samples.message_types(), ids=lambda t: t.__name__)
def test_every_message_has_its_section(message_type: type[msgspec.Struct]) -> None:
    assert f"`{wire_samples.tag_of(message_type)}`" in HEADINGS


@pytest.mark.parametrize("reason", [*AdmissionReason, *DoneReason])
def test_every_reason_is_explained(reason: str) -> None:
    assert re.search(rf"^\| `{reason}` \| \S", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    "limit",
    [
        limits.MAX_FRAME_BYTES,
        limits.MAX_TEXT_BYTES,
        limits.MAX_TOKENS_BYTES,
        limits.MAX_EVENTS,
        limits.MAX_REQUESTS,
        limits.MAX_MESSAGES,
        limits.MAX_STOPS,
        limits.MAX_STOP_CHARS,
        limits.MAX_NAME,
        limits.MAX_DETAIL,
        limits.MAX_SEQUENCES,
        limits.MAX_DEPTH,
    ],
)
def test_every_limit_is_on_the_page(limit: int) -> None:
    assert re.search(rf"\b{limit:,}\b", PAGE)


def test_every_link_on_the_page_leads_somewhere() -> None:
    anchors = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in HEADINGS}
    assert set(re.findall(r"\]\(#([^)]*)\)", PAGE)) <= anchors
