"""The node's facts for clients and operators, JSON-safe."""

from __future__ import annotations

import os
from typing import Any

from treadle_broker.scheduler import Scheduler
from treadle_broker.session import Session
from treadle_broker.worker_link import WorkerLink
from treadle_shared.config import NodeConfig
from treadle_shared.ticks import WorkerHello

MAX_LISTED = 2000  # sessions in one answer: it stays inside a frame; ``total`` tells how many there are


class Status:
    """Reads the node; ``model_name`` is what its tokenizer calls the model."""

    def __init__(
        self, config: NodeConfig, scheduler: Scheduler, link: WorkerLink, boot_id: str, model_name: str
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._link = link
        self._boot_id = boot_id
        self._model_name = model_name

    @property
    def hello(self) -> WorkerHello | None:
        """What the welcomed worker said of itself."""
        peer = self._link.welcomed
        return None if peer is None else peer.hello

    @property
    def exact(self) -> bool:
        """Whether the worker has shown that its answers are exact."""
        hello = self.hello
        return hello is not None and hello.facts.exact

    def reason(self, draining: bool) -> str:
        """Why the node does not serve, or empty."""
        if draining:
            return "draining"
        if self._scheduler.ready:
            return ""
        peer = self._link.peer
        if peer is None:
            return "no worker"
        return f"worker {peer.phase} ({peer.load:.0%})" if peer.phase == "loading" else f"worker {peer.phase}"

    def status(self, now: float, draining: bool) -> dict[str, Any]:
        """What ``treadle status`` shows."""
        reason = self.reason(draining)
        peer, hello = self._link.peer, self.hello
        return {
            "ready": not reason,
            "reason": reason,
            "exact": self.exact,
            "exact_detail": hello.exact_detail if hello else "",
            "recipe": hello.facts.recipe_fingerprint if hello else "",
            "model": self._model_name,
            "engine": self._config.engine,
            "numerics": self._config.effective_numerics,
            "pids": {"broker": os.getpid(), "worker": peer.pid if peer else None},
            "boot_id": self._boot_id,
            "phase": peer.phase if peer else "absent",
            "load": peer.load if peer and hello is None else float(hello is not None),
            "kv_drift_rows": self._scheduler.kv_drift_rows,
            "kv_bytes_peak": self._scheduler.kv_rows_peak * self._scheduler.facts.kv_bytes_per_token,
            "cache_misses": self._scheduler.cache_misses,
            "worker_welcomes": self._link.welcomes,
            "limits": self._limits(),
            "telemetry": self._scheduler.telemetry(now).to_dict(),
        }

    def model(self) -> dict[str, Any]:
        """What the loaded model is."""
        facts = self._scheduler.facts
        hello = self.hello
        return {
            "name": self._model_name,
            "engine": self._config.engine,
            "numerics": self._config.effective_numerics,
            "exact": self.exact,
            "recipe": facts.recipe_fingerprint,
            "device": hello.device if hello else "",
            "n_vocab": facts.n_vocab,
            "context_tokens": facts.context_tokens,
            "kv_bytes_per_token": facts.kv_bytes_per_token,
            "weight_bytes": facts.weight_bytes,
            "scratch_bytes_per_session": facts.scratch_bytes_per_session,
            "default_max_tokens": self._config.effective_max_tokens,
        }

    def sessions(self, now: float) -> dict[str, Any]:
        """Live sessions, oldest first; the operator's view."""
        sessions = self._scheduler.sessions()
        shown = [_describe(session, now) for session in sessions[:MAX_LISTED]]
        return {"sessions": shown, "total": len(sessions)}

    def worker(self, draining: bool) -> dict[str, Any]:
        """The worker's state as telemetry tells it."""
        peer = self._link.peer
        return {
            "ready": self._scheduler.ready,
            "reason": self.reason(draining),
            "exact": self.exact,
            "worker_id": peer.worker_id if peer else "",
            "pid": peer.pid if peer else None,
            "phase": peer.phase if peer else "absent",
            "load": peer.load if peer else 0.0,
        }

    def _limits(self) -> dict[str, Any]:
        config = self._config
        return {
            "max_sessions": config.max_sessions,
            "cache_slots": config.effective_cache_slots if self._scheduler.facts.can_copy else 0,
            "session_tokens": min(config.session_tokens, self._scheduler.facts.context_tokens),
            "queue_depth": config.queue_depth,
            "queue_tokens": config.queue_tokens,
            "kv_policy": config.kv_policy,
            "slots": config.effective_slots,
            "slice_tokens": config.slice_tokens,
            "max_prefill_tokens_per_tick": config.max_prefill_tokens_per_tick,
            "burst_prefill_tokens_per_tick": config.burst_prefill_tokens_per_tick,
            "target_itl_ms": config.target_itl_ms,
            "target_ttft_ms": config.target_ttft_ms,
            "coalesce_ms": config.coalesce_ms,
        }


def _describe(session: Session, now: float) -> dict[str, Any]:
    return {
        "session_id": session.key.session_id,
        "client": session.key.client,
        "epoch": session.key.epoch,
        "state": session.state.name.lower(),
        "slot": session.slot,
        "priority": session.job.priority,
        "prompt_tokens": session.job.prompt_tokens,
        "max_tokens": session.job.max_new_tokens,
        "emitted": session.emitted,
        "age_s": round(now - session.submitted_at, 3),
    }
