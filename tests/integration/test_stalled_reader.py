"""A client that stops reading misses nothing and holds nobody up; benchmarks/stalled_reader.py is the long form."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from real_node import RealNode, wait_for

SESSIONS, TOKENS = 20, 300
OPTIONS: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.7, "seed": 4}
READER = (
    "import json, sys\nfrom treadle import Client\nclient = Client(sys.argv[1])\noptions = json.loads(sys.argv[2])\n"
    "sessions = client.submit_many([{'prompt': 'p%d' % n, **options} for n in range(int(sys.argv[3]))])\n"
    "print('running', flush=True)\nsys.stdin.readline()\n"
    "print(json.dumps([s.tokens for s in sessions if s.wait()]))\n"
)
GAP_S = 5.0  # far above what a busy machine makes of a millisecond, far below the time that the reader is stopped


def test_a_client_that_stops_reading_misses_nothing_and_holds_nobody_up(make_node: Any) -> None:
    node: RealNode = make_node(engine="reference", session_tokens=512, max_sessions=SESSIONS + 1)
    node.start().wait_ready()
    with node.client() as client:
        requests = [{"prompt": f"p{number}", **OPTIONS} for number in range(SESSIONS)]
        quiet = [session.tokens for session in client.submit_many(requests) if session.wait(60)]
        command = [sys.executable, "-c", READER, str(node.path), json.dumps(OPTIONS), str(SESSIONS)]
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "running\n"
            reader.send_signal(signal.SIGSTOP)
            longest, last = 0.0, time.monotonic()
            for _ in client.generate("neighbour", **OPTIONS).events():
                now = time.monotonic()
                longest, last = max(longest, now - last), now
            wait_for(lambda: client.telemetry()["active_sessions"] == 0, "its sessions run to their ends", 60)
            memory = _anonymous_kib(node.processes["broker"].pid)
            reader.send_signal(signal.SIGCONT)
            answers, _ = reader.communicate("\n", timeout=60)
        finally:
            reader.kill()
            reader.wait()
        assert json.loads(answers) == quiet
        assert longest < GAP_S
        assert memory < 200 << 10


def _anonymous_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
