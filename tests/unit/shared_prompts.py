"""A scheduler that shares beginnings of prompts, and what its plans copy and keep."""

from __future__ import annotations

from array import array

from hand_worker import facts, finish, job, node

from treadle_broker import Job, Scheduler
from treadle_broker.plan import Plan
from treadle_broker.prefix_hash import PrefixHasher
from treadle_shared.engine import EngineFacts

BLOCK = 4
HASHER = PrefixHasher("node", BLOCK)
ENGINE = facts(can_copy=True, max_sequences=8)


def sharing(depth: int = 1, cache_slots: int = 2, engine: EngineFacts = ENGINE, **changes: int) -> Scheduler:
    """Four places for sessions, and more for what they leave."""
    return node(depth, engine, cache_slots=cache_slots, prefix_block_tokens=BLOCK, **changes)


def chain_of(hasher: PrefixHasher, client: str, salt: str, tokens: array[int]) -> bytes:
    """The digests of a whole sequence."""
    return hasher.chain(client, salt).grow(tokens)


def asking(name: str, common: int, own: int, new: int = 3, salt: str = "") -> Job:
    """A prompt of so many tokens like everybody's, then so many of its own."""
    tokens = array("i", [*range(common), *(1000 * sum(name.encode()) + place for place in range(own))])
    return job(name, len(tokens), new, prefix=chain_of(HASHER, "ann", salt, tokens))


def copies(plan: Plan) -> list[tuple[int, int, int]]:
    """From slot, to slot, rows, of what new sessions start from."""
    return [(row.source, row.slot, row.rows) for row in plan.copy]


def kept(plan: Plan) -> list[tuple[int, int, int]]:
    """From slot, to slot, rows, of what is kept."""
    return [(row.source, row.slot, row.rows) for row in plan.keep]


def run(scheduler: Scheduler, *jobs: Job) -> None:
    """Jobs from their submission to their end, all that is due then done."""
    scheduler.submit(jobs, 0.0)
    finish(scheduler)
