"""The load of a chaos run: sessions whose right answers are known, asked for again and again."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from treadle import (
    Client,
    InvalidRequest,
    Overloaded,
    Refused,
    Session,
    SessionEnded,
    SessionFailed,
    TreadleError,
    Unavailable,
)

POISON = "\x07"  # the node is started with ``kill@token=7``: a prompt with this byte kills its worker
RESUME_S = 120.0  # long enough for every restart that chaos brings
SESSION_TIMEOUT_S = 240.0  # a session that takes longer is a violation: something was lost


@dataclass(frozen=True, slots=True)
class Question:
    """One request and, once asked on a quiet node, its right answer."""

    prompt: str
    options: dict[str, Any]

    def ask(self, client: Client, **more: Any) -> Session:
        """Submit it."""
        return client.generate(self.prompt, **self.options, **more)


@dataclass(slots=True)
class Tally:
    """What happened, and everything that must not happen."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def violate(self, what: str) -> None:
        """Something that must never be."""
        self.violations.append(what)
        print(f"VIOLATION: {what}", flush=True)


def make_questions(random_: random.Random, count: int, longest: int) -> list[Question]:
    """Questions of many lengths; half of them sampled."""
    questions = []
    for number in range(count):
        prompt = f"question {number}: " + "lorem ipsum dolor " * random_.randrange(0, 12)
        temperature = random_.choice((0.0, 0.9))
        options = {"max_tokens": random_.randrange(8, longest), "temperature": temperature, "seed": number}
        questions.append(Question(prompt, {**options, "ignore_eos": True}))
    return questions


_ENDS = {
    "whole": ("length",),
    "cancel": ("length", "cancelled"),
    "leave": ("length", "cancelled"),
    "deadline": ("length", "deadline"),
}
"""How a session of each kind may end."""


class Load:
    """Threads that ask, each through a client of its own, until told to stop."""

    def __init__(self, path: str, questions: list[Question], answers: list[list[int]], threads: int, seed: int) -> None:
        self.tally = Tally()
        self._path = path
        self._questions = questions
        self._answers = answers
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}/{number}"),)) for number in range(threads)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let every thread finish its session."""
        self._over.set()
        for thread in self._threads:
            thread.join(SESSION_TIMEOUT_S + 30)
            if thread.is_alive():
                self.tally.violate("a client's thread never came back")

    def _run(self, random_: random.Random) -> None:
        while not self._over.is_set():
            try:
                with Client(self._path, resume=True, resume_timeout=RESUME_S, timeout=30.0) as client:
                    for _ in range(random_.randrange(1, 12)):
                        if self._over.is_set():
                            return
                        self._one(client, random_)
            except Unavailable:
                self.tally.outcomes["unavailable"] += 1
                time.sleep(0.1)

    def _one(self, client: Client, random_: random.Random) -> None:
        number = random_.randrange(len(self._questions))
        kind = random_.choices(("whole", "cancel", "leave", "deadline", "bad"), (12, 2, 1, 1, 1))[0]
        try:
            if kind == "bad":
                self._bad(client)
                return
            more = {"deadline_s": random_.uniform(0.05, 0.5)} if kind == "deadline" else {}
            session = self._questions[number].ask(client, **more)
        except Overloaded as refused:
            self.tally.outcomes["overloaded"] += 1
            self._over.wait(min(refused.retry_after_s or 0.1, 2.0))
            return
        except Refused as refused:
            self.tally.outcomes[refused.reason.value] += 1
            self._over.wait(0.1)
            return
        self._follow(session, self._answers[number], kind, random_)

    def _bad(self, client: Client) -> None:
        try:
            client.generate("", max_tokens=4)
            self.tally.violate("an empty prompt was accepted")
        except InvalidRequest:
            self.tally.outcomes["invalid"] += 1

    def _follow(self, session: Session, answer: list[int], kind: str, random_: random.Random) -> None:
        try:
            if kind in ("cancel", "leave"):
                wanted = random_.randrange(0, len(answer))
                for _ in session:
                    if len(session.tokens) >= wanted:
                        break
                session.cancel()
            reason = session.wait(SESSION_TIMEOUT_S)
        except SessionEnded as ended:
            reason = str(ended)
        except Unavailable:
            self.tally.outcomes["unavailable"] += 1
            return
        except (TreadleError, TimeoutError) as error:
            self.tally.violate(f"{session.session_id} ({kind}): {error!r}")
            return
        self._check(session, answer, kind, reason)

    def _check(self, session: Session, answer: list[int], kind: str, reason: str) -> None:
        tokens = session.tokens
        if tokens != answer[: len(tokens)]:
            at = next(place for place, pair in enumerate(zip(tokens, answer, strict=False)) if pair[0] != pair[1])
            self.tally.violate(f"{session.session_id} ({kind}, {reason}): token {at} of {len(tokens)} is wrong")
        elif reason == "length" and len(tokens) != len(answer):
            self.tally.violate(f"{session.session_id}: ended after {len(tokens)} of {len(answer)} tokens")
        elif reason not in _ENDS[kind]:
            *_, end = session.events()
            self.tally.violate(f"{session.session_id} ({kind}): ended {reason} ({getattr(end, 'detail', '')})")
        self.tally.outcomes[reason] += 1


def ask_poison(client: Client, tally: Tally) -> None:
    """A request that kills its worker must fail, and alone."""
    try:
        client.generate(f"x{POISON}", max_tokens=4).result(timeout=SESSION_TIMEOUT_S)
        tally.violate("a request that kills its worker was answered")
    except SessionFailed as failed:
        tally.outcomes["poison"] += 1
        if "poison" not in str(failed):
            tally.violate(f"a poisonous request ended as {failed}")
    except (Refused, Unavailable):
        tally.outcomes["poison unavailable"] += 1
