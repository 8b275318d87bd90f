"""Random walks over a recorded scheduler: whatever happened, the scheduler alone decides it again from the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from clientele import Clientele
from scheduler_world import World
from test_scheduler_walks import Walk

from treadle_broker.replay import replay
from treadle_broker.tick_file import TickFile, predecessor
from treadle_broker.tick_log import RecordedScheduler, TickLog

_WALKS = 60


def recorded(world: World, log: TickLog) -> None:
    """Put a recorded scheduler in the place of the world's own, before anything has happened."""
    recover_misses = world.scheduler._settlement._recover_misses
    world.scheduler = RecordedScheduler(
        world.budget, world.facts, log, depth=world.depth, recover_misses=recover_misses
    )
    world.clients = Clientele(world.scheduler, world.budget, world.facts)


@pytest.mark.parametrize("depth", [1, 2])
def test_every_decision_of_a_walk_is_made_again_from_its_log(depth: int, tmp_path: Path) -> None:
    kinds_of_files = set()
    for seed in range(_WALKS):
        walk = Walk(seed, depth, turns=seed % 2 == 1)
        path = tmp_path / f"{seed}.log"
        log = TickLog(TickFile(path), 12_000 if seed % 3 else 1 << 20)  # short files begin anew, or are cut
        recorded(walk.world, log)
        walk.run()
        walk.world.clients.check(walk.world.now)
        log.close()
        for file in filter(Path.exists, (path, predecessor(path))):
            report = replay(file)
            assert report.clean, f"Walk({seed}, depth={depth}, turns={seed % 2 == 1}): {list(report.lines())}"
            assert not report.torn_bytes
            kinds_of_files |= {("later", report.number > 0), ("cut", report.cut)}
        assert log.files > 1 or not predecessor(path).exists()
    assert ("later", True) in kinds_of_files
    assert ("cut", True) in kinds_of_files
