"""Messages between the broker and its worker.

One tick is one plan for the engine: what is kept for reuse, releases, copies of prefixes, then the decode rows as one
batch, then prefill chunks.
Every tick is answered by one or two results: the decode part leaves before prefill runs.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from treadle_shared.engine import EngineFacts, TokenLogprobs
from treadle_shared.limits import MAX_DETAIL, MAX_NAME, MAX_SEQUENCES, MAX_TOKENS_BYTES
from treadle_shared.sampling import SamplingParams

Slot = Annotated[int, Meta(ge=0, lt=MAX_SEQUENCES)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Token = Annotated[int, Meta(ge=-1, lt=1 << 31)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Detail = Annotated[str, Meta(max_length=MAX_DETAIL)]
TokenBytes = Annotated[bytes, Meta(max_length=MAX_TOKENS_BYTES)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class PrefillRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk of prompt for one slot; ``tokens`` is a little-endian int32 array (see PrefillItem)."""

    slot: Slot
    gen: Count
    start: Count
    tokens: TokenBytes
    sample: bool
    n_emitted: Count = 0
    params: SamplingParams | None = None


class DecodeRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One row for one slot; ``token`` -1 feeds the slot's last sampled token back (see DecodeItem)."""

    slot: Slot
    gen: Count
    pos: Count
    token: Token = -1
    sample: bool = True


class RestoreRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sequence that was parked as generation ``parked`` goes on in ``slot`` as generation ``gen``."""

    slot: Slot
    parked: Count
    gen: Count


class CopyRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first ``rows`` rows of slot ``source`` open slot ``slot`` (see CopyItem; ``seen`` is a token array)."""

    source: Slot
    source_gen: Count
    slot: Slot
    gen: Count
    rows: Annotated[int, Meta(ge=1, lt=1 << 53)]
    params: SamplingParams | None = None
    seen: TokenBytes = b""


class Tick(msgspec.Struct, frozen=True, tag="tick", kw_only=True, forbid_unknown_fields=True):
    """One plan. ``gen`` is new for each assignment of a slot; ``resync`` ends the refusal of ticks that
    follows a failed one.

    Moves come before rows, in this order. ``keep``: rows without parameters, each into a slot that is empty or was
    filled by an earlier ``keep``, which it replaces. Sequences in ``park``, as ``(slot, gen)``, are moved to host
    memory, and parked ones in ``discard``, by generation, are forgotten. Slots in ``release`` are emptied. Those in
    ``restore`` are taken back into empty slots. ``copy``, rows with parameters, opens empty slots.

    ``hold``: the answer may wait for the next tick's, where that one is there, decodes and moves nothing. One that
    ends a sequence or tells of a failure leaves at once, with those that wait.
    """

    broker_id: Name
    worker_id: Name
    tick_id: Count
    resync: bool = False
    release: Annotated[list[Slot], Meta(max_length=MAX_SEQUENCES)] = []
    decode: Annotated[list[DecodeRow], Meta(max_length=MAX_SEQUENCES)] = []
    prefill: Annotated[list[PrefillRow], Meta(max_length=MAX_SEQUENCES)] = []
    park: Annotated[list[tuple[Slot, Count]], Meta(max_length=MAX_SEQUENCES)] = []
    restore: Annotated[list[RestoreRow], Meta(max_length=MAX_SEQUENCES)] = []
    discard: Annotated[list[Count], Meta(max_length=2 * MAX_SEQUENCES)] = []
    keep: Annotated[list[CopyRow], Meta(max_length=MAX_SEQUENCES)] = []
    copy: Annotated[list[CopyRow], Meta(max_length=MAX_SEQUENCES)] = []
    hold: bool = False


class ResultRow(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one row yielded: ``token`` -1 where none was asked for or ``miss`` (its KV was evicted)."""

    slot: Slot
    gen: Count
    token: Token
    eog: bool = False
    miss: bool = False
    logprobs: TokenLogprobs | None = None


class Timings(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Seconds of one part: inside the engine's batch call, inside sampling, and all together."""

    engine_s: Seconds = 0.0
    sample_s: Seconds = 0.0
    total_s: Seconds = 0.0


class TickResult(msgspec.Struct, frozen=True, tag="result", kw_only=True, forbid_unknown_fields=True):
    """One part of a tick's answer; ``last`` closes the tick.

    Part 0 answers the decode rows and every skipped one, part 1 the prefill rows. ``skipped`` names
    ``(slot, gen)`` whose row was not run because the sequence had already ended there (or its KV was
    missing). ``not_run``: the whole tick was refused; ``error`` says why, and a non-zero ``error_code`` that
    this very tick contradicted the engine's state (0: an earlier one failed). ``error`` without ``not_run``:
    this part's batch failed with ``error_code``, the KV of every sequence in it is unknown, and later parts
    are not run. ``kv_tokens``: rows the engine holds after this part. ``unparked``, in the first part: generations
    that the tick asked to park and that are not there, because the sequence had ended or its state could not be
    saved. ``parked_bytes``: host memory of parked sequences after this part.
    """

    broker_id: Name
    worker_id: Name
    tick_id: Count
    part: Annotated[int, Meta(ge=0, le=1)] = 0
    last: bool = True
    rows: Annotated[list[ResultRow], Meta(max_length=2 * MAX_SEQUENCES)] = []
    skipped: Annotated[list[tuple[Slot, Count]], Meta(max_length=MAX_SEQUENCES)] = []
    not_run: bool = False
    error: Detail = ""
    error_code: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    kv_tokens: Count = 0
    timings: Timings = Timings()
    unparked: Annotated[list[Count], Meta(max_length=MAX_SEQUENCES)] = []
    parked_bytes: Count = 0


class WorkerHello(msgspec.Struct, frozen=True, tag="worker_hello", kw_only=True, forbid_unknown_fields=True):
    """A worker whose model is loaded and has run one real decode offers itself."""

    major: Count
    minor: Count
    worker_id: Name
    pid: Count
    engine: Name
    model: Annotated[str, Meta(max_length=4096)]
    numerics: Name
    facts: EngineFacts
    device: Name = "cpu"
    exact_detail: Detail = ""


class WorkerWelcome(msgspec.Struct, frozen=True, tag="worker_welcome", kw_only=True, forbid_unknown_fields=True):
    """The broker takes this worker; it must empty every slot before the first tick."""

    major: Count
    minor: Count
    broker_id: Name
    worker_id: Name


class WorkerRefused(msgspec.Struct, frozen=True, tag="worker_refused", kw_only=True, forbid_unknown_fields=True):
    """The broker does not take this worker: ``reason`` is ``busy``, ``version``, ``recipe``, ``tokenizer`` or
    ``unknown`` (say hello first)."""

    reason: Name
    message: Detail = ""


class Probe(msgspec.Struct, frozen=True, tag="probe", kw_only=True, forbid_unknown_fields=True):
    """The broker looks whether the worker's connection still stands; the worker ignores it."""

    broker_id: Name


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat", kw_only=True, forbid_unknown_fields=True):
    """Sent by the worker's main thread every ``heartbeat_s``, also while the model loads.

    ``progress`` counts finished ticks, ``tick_age_s`` is the age of the running one (0 when idle);
    ``phase`` is ``loading``, ``testing``, ``ready`` or ``draining``; ``load`` in [0, 1].
    """

    worker_id: Name
    pid: Count
    phase: Name
    load: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    progress: Count = 0
    tick_age_s: Seconds = 0.0


class WorkerBye(msgspec.Struct, frozen=True, tag="worker_bye", kw_only=True, forbid_unknown_fields=True):
    """The worker leaves on purpose; ``reason`` is for the log."""

    worker_id: Name
    reason: Detail = ""


ToWorker = Tick | WorkerWelcome | WorkerRefused | Probe
FromWorker = TickResult | WorkerHello | Heartbeat | WorkerBye
