"""Which slot holds which prompt's beginning: what a new sequence can start from instead of computing it.

A sequence is known by its *chain*: one digest for each whole block of tokens, each over everything before it too, so
two sequences with the same i-th digest have the same first i blocks. Those that run and those kept of finished sessions
stand in one index. An answer goes on where its prompt ends, so that a conversation's next turn finds both; where
decoding a token gives another row than prefilling it would, rows of emitted tokens do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from treadle_broker.plan import PlannedCopy
from treadle_broker.session import DIGEST_BYTES, Session
from treadle_broker.slots import SlotTable

_MIN_NEW_BLOCKS = 2  # what adds less to what is there is not kept: a copy costs as much as a short prefill


@dataclass(slots=True, eq=False)
class Holder:
    """One sequence: its slot under generation ``gen`` holds the first blocks of ``chain``. A running session's rows
    grow; what is kept of one that ended (``session`` None) is all there.
    """

    slot: int
    gen: int
    chain: bytes
    session: Session | None = None

    @property
    def blocks(self) -> int:
        """Blocks that are, or will be, there."""
        return len(self.chain) // DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Found:
    """Where a prompt's first ``rows`` rows are to be had; ``wait``: they are being computed right now."""

    holder: Holder
    rows: int
    wait: bool


class PrefixMap:
    """The running sequences that can be copied from, and the kept ones, least recently used first.

    With no cache slots nothing is looked up or kept. ``rows`` is what all kept sequences hold.
    """

    def __init__(self, slots: SlotTable) -> None:
        self.rows = 0
        self._slots = slots
        self._places = range(0)
        self._block = 1
        self._answers = False
        self._holders: dict[bytes, dict[Holder, None]] = {}
        self._running: dict[Session, Holder] = {}
        self._kept: dict[int, Holder] = {}
        self._departed: list[Holder] = []
        self._adding: dict[Session, int] = {}  # rows in the tick being planned, which runs its copies first

    def reset(self, places: range, block: int, *, answers: bool) -> None:
        """The engine is empty; ``places`` are its cache slots, a block has ``block`` tokens. ``answers``: a decoded row
        is as good as a prefilled one.
        """
        self._places, self._block, self._answers, self.rows = places, block, answers, 0
        for index in (self._holders, self._running, self._kept, self._adding):
            index.clear()
        self._departed.clear()

    # ---- running sequences

    def offer(self, session: Session, rows: int) -> None:
        """So many more rows of a session are planned: others may copy what is there, and wait for what will be."""
        chain = self._chain(session)
        if not self._places or not chain:
            return
        self._adding[session] = rows
        if session not in self._running:
            self._run(session, chain)

    def grown(self, session: Session) -> None:
        """Emitted tokens have made more blocks of its chain whole."""
        chain = self._chain(session)
        holder = self._running.get(session)
        if holder is not None:
            known, holder.chain = holder.blocks, chain
            self._enter(holder, known)
        elif chain and self._places and session.slot is not None and session.rows_done:
            self._run(session, chain)  # its prompt was shorter than a block

    def _run(self, session: Session, chain: bytes) -> None:
        assert session.slot is not None
        holder = self._running[session] = Holder(session.slot, session.gen, chain, session)
        self._enter(holder)

    def _chain(self, session: Session) -> bytes:
        return session.chain if self._answers else session.job.prefix

    def withdraw(self, session: Session) -> None:
        """Its rows are gone or not to be trusted; one that was never offered is no error."""
        holder = self._running.pop(session, None)
        if holder is not None:
            self._leave(holder)

    def depart(self, session: Session) -> None:
        """It is about to give up its slot, which the next plan empties: what it put there may be kept."""
        holder = self._running.pop(session, None)
        if holder is None:
            return
        self._leave(holder)
        blocks = session.rows_planned // self._block
        holder.session, holder.chain = None, holder.chain[: blocks * DIGEST_BYTES]
        if holder.chain:
            self._departed.append(holder)

    def distrust(self, slot: int, gen: int) -> None:
        """The KV of that sequence was found to be gone."""
        self._departed = [one for one in self._departed if (one.slot, one.gen) != (slot, gen)]
        kept = self._kept.get(slot)
        if kept is not None and kept.gen == gen:
            self.drop(slot)

    # ---- finding

    def find(self, session: Session, least_left: int, runs: Callable[[Session], bool]) -> Found | None:
        """The longest beginning of what a session prefills that is there or under way; at least ``least_left`` rows are
        left to it. ``runs``: whether a session may get rows now, and so is worth waiting for.
        """
        if not self._places:
            return None
        chain = self._chain(session)
        most = min(len(chain) // DIGEST_BYTES, (session.prefill_rows - least_left) // self._block)
        for blocks in range(self._longest(chain, most), 0, -1):
            found = self._at(_digest(chain, blocks), blocks * self._block, runs)
            if found is not None:
                return found
        return None

    def _at(self, digest: bytes, rows: int, runs: Callable[[Session], bool]) -> Found | None:
        coming: Holder | None = None
        for holder in self._holders[digest]:
            if self._ready(holder, rows):
                return Found(holder, rows, wait=False)
            if coming is None and _prefills(holder, rows) and runs(cast(Session, holder.session)):
                coming = holder
        return None if coming is None else Found(coming, rows, wait=True)

    def _ready(self, holder: Holder, rows: int) -> bool:
        """Whether so many rows are planned in ticks that were sent; decoded ones, which this tick may add to, must be
        there.
        """
        session = holder.session
        if session is None or session.rows_done >= rows:
            return True
        return _prefills(holder, rows) and session.rows_planned - self._adding.get(session, 0) >= rows

    def _longest(self, chain: bytes, most: int) -> int:
        """Blocks of the longest beginning that some sequence has: by halving, since all shorter ones are there too."""
        low, high = 0, max(most, 0)
        while low < high:
            middle = (low + high + 1) // 2
            if _digest(chain, middle) in self._holders:
                low = middle
            else:
                high = middle - 1
        return low

    def use(self, holder: Holder) -> None:
        """A sequence was begun from this one."""
        if holder.session is None:
            self._kept[holder.slot] = self._kept.pop(holder.slot)

    def touch(self, session: Session) -> None:
        """A session has got a slot: what is kept of its beginning should still be there when it begins."""
        chain = self._chain(session)
        blocks = self._longest(chain, len(chain) // DIGEST_BYTES) if self._kept else 0
        if blocks:
            for holder in self._holders[_digest(chain, blocks)]:
                self.use(holder)

    # ---- keeping

    def keep_departed(self, room: int, most: int) -> tuple[PlannedCopy, ...]:
        """First of all in a plan: what is kept of the sequences whose slots it empties, at most ``most`` of them, the
        longest first, with at most ``room`` rows kept in all.
        """
        self._adding.clear()
        departed, self._departed = self._departed, []
        kept: dict[int, PlannedCopy] = {}
        for holder in sorted(departed, key=lambda one: -one.blocks):
            copy = self._keep(holder, room, kept) if len(kept) < most else None
            if copy is not None:
                kept[copy.slot] = copy
        return tuple(kept.values())

    def shrink(self, room: int) -> None:
        """Give up what was used least recently until at most ``room`` rows are kept."""
        while self.rows > room:
            self.drop(next(iter(self._kept)))

    def drop(self, slot: int) -> None:
        """Keep nothing in a cache slot; what the engine has there goes with the next tick."""
        holder = self._kept.pop(slot, None)
        if holder is not None:
            self.rows -= holder.blocks * self._block
            self._leave(holder)
        self._slots.mark_dirty(slot)

    def void(self, copies: tuple[PlannedCopy, ...]) -> None:
        """A tick was lost, and nobody knows what became of the copies it was to keep, or of what left since."""
        self._departed.clear()
        for copy in copies:
            self.drop(copy.slot)

    def _keep(self, holder: Holder, room: int, pinned: dict[int, PlannedCopy]) -> PlannedCopy | None:
        rows = holder.blocks * self._block
        if not self._adds(holder):
            return None
        slot = self._place(holder, pinned)
        if slot is None or not self._make_room(slot, room - rows, pinned):
            return None
        if slot in self._kept:
            self.drop(slot)
        entry = self._kept[slot] = Holder(slot, self._slots.new_gen(), holder.chain)
        self._slots.overwrite(slot, rows)
        self.rows += rows
        self._enter(entry)
        return PlannedCopy(None, holder.slot, holder.gen, slot, entry.gen, rows)

    def _adds(self, holder: Holder) -> bool:
        """Whether the sequence has enough that nobody else has; who has the most of it counts as used."""
        for known in range(self._longest(holder.chain, holder.blocks), 0, -1):
            for other in self._holders[_digest(holder.chain, known)]:
                if self._ready(other, known * self._block):
                    self.use(other)
                    return holder.blocks - known >= _MIN_NEW_BLOCKS
        return True

    def _place(self, holder: Holder, pinned: dict[int, PlannedCopy]) -> int | None:
        """The cache slot to fill: of a sequence that is all part of the new one, an empty one, the least recent."""
        for slot, kept in self._kept.items():
            if holder.chain.startswith(kept.chain):  # never one of this tick: those are longer
                return slot
        if len(self._kept) < len(self._places):
            return next(slot for slot in self._places if slot not in self._kept)
        return next((slot for slot in self._kept if slot not in pinned), None)

    def _make_room(self, slot: int, room: int, pinned: dict[int, PlannedCopy]) -> bool:
        """Drop least recent ones until, ``slot`` not counted, at most ``room`` rows are kept; nothing where it would
        take what was kept for the same tick.
        """
        replaced = self._kept.get(slot)
        excess = self.rows - room - (replaced.blocks * self._block if replaced else 0)
        victims = []
        for other, kept in self._kept.items():
            if excess <= 0:
                break
            if other != slot and other not in pinned:
                victims.append(other)
                excess -= kept.blocks * self._block
        if excess > 0:
            return False
        for victim in victims:
            self.drop(victim)
        return True

    # ---- the index

    def _enter(self, holder: Holder, known: int = 0) -> None:
        """Its blocks after the first ``known`` ones."""
        for blocks in range(known + 1, holder.blocks + 1):
            self._holders.setdefault(_digest(holder.chain, blocks), {})[holder] = None

    def _leave(self, holder: Holder) -> None:
        for blocks in range(1, holder.blocks + 1):
            digest = _digest(holder.chain, blocks)
            holders = self._holders[digest]
            del holders[holder]
            if not holders:
                del self._holders[digest]

    # ---- going on elsewhere

    def memory(self) -> list[tuple[int, int, bytes]]:
        """Slot, generation and chain of what is kept, least recently used first."""
        return [(holder.slot, holder.gen, holder.chain) for holder in self._kept.values()]

    def remember(self, memory: list[tuple[int, int, bytes]]) -> None:
        """Go on from another map's memory."""
        for slot, gen, chain in memory:
            holder = self._kept[slot] = Holder(slot, gen, chain)
            self.rows += holder.blocks * self._block
            self._slots.overwrite(slot, holder.blocks * self._block)
        for holder in sorted(self._kept.values(), key=lambda one: one.gen):  # as they were kept, which the index shows
            self._enter(holder)

    def check(self) -> None:
        """Raise AssertionError where map and index disagree."""
        everyone = {*self._running.values(), *self._kept.values()}
        assert {one for holders in self._holders.values() for one in holders} == everyone
        assert all(holders for holders in self._holders.values())
        assert self.rows == sum(holder.blocks * self._block for holder in self._kept.values())
        assert all(slot in self._places for slot in self._kept)
        for session, holder in self._running.items():
            assert session.live
            assert (session.slot, session.gen) == (holder.slot, holder.gen)
            assert session.rows_planned > 0


def _prefills(holder: Holder, rows: int) -> bool:
    """Whether so many rows of a running session are all prefilled: one waits for those, never for decoded ones."""
    return holder.session is not None and rows <= holder.session.prefill_rows


def _digest(chain: bytes, blocks: int) -> bytes:
    """The digest of the first ``blocks`` blocks."""
    return chain[(blocks - 1) * DIGEST_BYTES : blocks * DIGEST_BYTES]
