"""Waiting until a node holds nothing."""

from __future__ import annotations

import time
from typing import Any, Final

from treadle.client import Client

IDLE_TIMEOUT_S: Final = 10.0  # the ledger is even a tick after the last answer; longer means a leak
_POLL_S: Final = 0.05


def settled_status(client: Client) -> dict[str, Any]:
    """The node's status once nothing is live, or as it is after IDLE_TIMEOUT_S."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    status = client.status()
    while any(held(status["telemetry"]).values()) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        status = client.status()
    return status


def held(telemetry: dict[str, Any]) -> dict[str, int]:
    """What an idle node must not hold."""
    return {name: telemetry[name] for name in ("kv_bytes", "active_sessions", "queue_depth")}
