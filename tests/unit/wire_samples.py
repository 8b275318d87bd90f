"""One sample of every message of the protocol, with every field set, and their golden bytes.

Run as a script to write the golden bytes anew, which a change of the protocol needs:
``python tests/unit/wire_samples.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import msgspec

from treadle_shared import calls, codec, ticks
from treadle_shared.admission import AdmissionDecision, AdmissionReason
from treadle_shared.engine import EngineFacts, TokenLogprobs
from treadle_shared.outcome import DoneReason
from treadle_shared.sampling import SamplingParams
from treadle_shared.tokens import pack_tokens

GOLDEN_FILE = Path(__file__).parent / "golden" / "messages.json"

KEY = bytes(range(16))
TOKENS = pack_tokens([1, 2, 49151])

PARAMS = SamplingParams(
    temperature=0.5,
    top_k=20,
    top_p=0.75,
    min_p=0.125,
    repeat_penalty=1.25,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    penalty_last_n=32,
    logit_bias={7: -2.5},
    seed=42,
    logprobs=3,
    ignore_eos=True,
)

DECISION = AdmissionDecision(
    reason=AdmissionReason.REJECTED_QUEUE_FULL,
    session_id="s-1",
    epoch=2,
    position=3,
    budget="queue_depth",
    needed=1,
    available=0,
    limit=4,
    retry_after_s=1.5,
    field="prompt",
    message="the queue is full",
)

FACTS = EngineFacts(
    recipe_fingerprint="r" * 8,
    n_vocab=49152,
    context_tokens=2048,
    max_sequences=8,
    kv_bytes_per_token=23040,
    weight_bytes=98_362_432,
    scratch_bytes_per_session=262_144,
    min_prefill_rows=2,
    replay_decode=True,
    exact=True,
    tokenizer_fingerprint="t" * 8,
    prefill_tokens_per_s=690.0,
    decode_tick_s=0.0125,
    parked_bytes_each=213_744,
    parked_bytes_per_token=23052,
    park_tokens_per_s=24_000.0,
    can_copy=True,
)

FROM_CLIENT: list[calls.FromClient] = [
    calls.Hello(major=1, minor=0, client="example"),
    calls.Submit(
        rid=1,
        requests=[
            calls.Request(
                prompt="naïve 歪",
                max_tokens=64,
                params=PARAMS,
                stop=["\n\n", "END"],
                session_id="s-1",
                key=KEY,
                priority=-5,
                queue_timeout_s=2.5,
                deadline_s=30.0,
                cache_salt="team-1",
            ),
            calls.Request(messages=[calls.ChatMessage(role="user", content="Hi")]),
            calls.Request(tokens=TOKENS, key=KEY, emitted=TOKENS, recipe="r-1"),
        ],
    ),
    calls.Cancel(rid=2, session_id="s-1", epoch=2, key=KEY),
    calls.Attach(rid=3, session_id="s-1", epoch=2, key=KEY, have_tokens=5),
    calls.Tokenize(rid=4, text="Hi"),
    calls.Ask(rid=5, what="status"),
    calls.Drain(rid=6, timeout_s=12.5),
    calls.Goodbye(),
]

TO_CLIENT: list[calls.ToClient] = [
    calls.Welcome(major=1, minor=0, boot_id="b-1"),
    calls.Decisions(
        rid=1,
        decisions=[calls.Decision(admission=DECISION, seed=42, key=KEY, prompt_tokens=3, max_tokens=64, recipe="r-1")],
    ),
    calls.Cancelled(rid=2, found=True),
    calls.Attached(rid=3, found=False),
    calls.Tokenized(rid=4, tokens=TOKENS),
    calls.Facts(rid=5, facts={"ready": True, "telemetry": {"queue_depth": 0}}),
    calls.Failure(rid=6, code="malformed", field="requests[0].stop", message="too long"),
    calls.Position(session_id="s-1", epoch=2, ahead=3),
    calls.Started(session_id="s-1", epoch=2, queued_s=0.25),
    calls.Recovering(session_id="s-1", epoch=2, why="the worker was lost"),
    calls.Delta(
        session_id="s-1",
        epoch=2,
        index=4,
        tokens=TOKENS,
        text=" 歪",
        logprobs=[calls.Logprob(token=1, logprob=-0.5, top=[(1, -0.5), (9, -1.25)])],
        recipe="r-1",
    ),
    calls.Done(
        session_id="s-1",
        epoch=2,
        reason=DoneReason.STOP,
        detail="a stop string",
        stop="END",
        usage=calls.Usage(prompt_tokens=3, completion_tokens=7, cached_tokens=2),
        timings=calls.SessionTimings(queued_s=0.25, ttft_s=0.5, total_s=1.5),
        exact=True,
    ),
]

TO_WORKER: list[ticks.ToWorker] = [
    ticks.Tick(
        broker_id="b-1",
        worker_id="w-1",
        tick_id=9,
        resync=True,
        release=[3],
        decode=[ticks.DecodeRow(slot=0, gen=4, pos=17, token=11, sample=False), ticks.DecodeRow(slot=1, gen=5, pos=3)],
        prefill=[
            ticks.PrefillRow(slot=2, gen=6, start=0, tokens=TOKENS, sample=True, n_emitted=1, params=PARAMS),
        ],
        park=[(3, 2)],
        restore=[ticks.RestoreRow(slot=1, parked=1, gen=5)],
        discard=[0],
        keep=[ticks.CopyRow(source=3, source_gen=2, slot=8, gen=7, rows=16)],
        copy=[ticks.CopyRow(source=8, source_gen=7, slot=3, gen=8, rows=16, params=PARAMS, seen=TOKENS)],
        hold=True,
    ),
    ticks.WorkerWelcome(major=1, minor=0, broker_id="b-1", worker_id="w-1"),
    ticks.WorkerRefused(reason="busy", message="another worker serves"),
    ticks.Probe(broker_id="b-1"),
]

FROM_WORKER: list[ticks.FromWorker] = [
    ticks.TickResult(
        broker_id="b-1",
        worker_id="w-1",
        tick_id=9,
        part=1,
        last=False,
        rows=[
            ticks.ResultRow(
                slot=0, gen=4, token=11, eog=True, miss=True, logprobs=TokenLogprobs(chosen=-0.5, top=[(11, -0.5)])
            ),
            ticks.ResultRow(slot=2, gen=6, token=-1),
        ],
        skipped=[(1, 5)],
        not_run=True,
        error="an earlier tick failed",
        error_code=-3,
        kv_tokens=20,
        timings=ticks.Timings(engine_s=0.25, sample_s=0.125, total_s=0.5),
        unparked=[3],
        parked_bytes=461_040,
    ),
    ticks.WorkerHello(
        major=1,
        minor=0,
        worker_id="w-1",
        pid=4242,
        engine="llama",
        model="model.gguf",
        numerics="exact",
        facts=FACTS,
        device="cuda0",
        exact_detail="8 prompts compared",
    ),
    ticks.Heartbeat(worker_id="w-1", pid=4242, phase="loading", load=0.5, progress=8, tick_age_s=0.25),
    ticks.WorkerBye(worker_id="w-1", reason="stopped"),
]

DIRECTIONS = {
    "client to broker": (FROM_CLIENT, calls.FromClient),
    "broker to client": (TO_CLIENT, calls.ToClient),
    "broker to worker": (TO_WORKER, ticks.ToWorker),
    "worker to broker": (FROM_WORKER, ticks.FromWorker),
}


def tag_of(message_type: type[msgspec.Struct]) -> str:
    """The value of ``type`` on the wire."""
    return str(message_type.__struct_config__.tag)


def samples() -> dict[str, msgspec.Struct]:
    """Every sample by its tag."""
    return {tag_of(type(message)): message for messages, _ in DIRECTIONS.values() for message in messages}


def message_types() -> list[type[msgspec.Struct]]:
    """Every message type of the protocol."""
    return [message_type for _, union in DIRECTIONS.values() for message_type in get_args(union)]


def golden() -> dict[str, bytes]:
    """The recorded bytes by tag."""
    recorded: dict[str, str] = json.loads(GOLDEN_FILE.read_text())
    return {tag: bytes.fromhex(text) for tag, text in recorded.items()}


def _write() -> None:
    recorded = {tag: codec.encode(message).hex() for tag, message in samples().items()}
    GOLDEN_FILE.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    _write()
