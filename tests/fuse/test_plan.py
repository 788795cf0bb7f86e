"""Plans on a real mount: a slow source, and trainers that speak the protocol over the socket."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mounting import Mounted, eventually, mounted
from planning import Trainer
from programs import program
from reading import lasting_source

from spiderfs.protocol import EpochEnd

FILES, SIZE = 400, 4_000
NAMES = [f"{number % 4}/{number:04d}" for number in range(FILES)]
# Every read of the source takes this long; a reader that does nothing else would wait 3 s for all files.
SLOW = {"source__latency_ms": 5, "policy": "minio"}


def training(mount: Mounted, names: Sequence[str] = NAMES) -> contextlib.AbstractContextManager[Trainer]:
    return contextlib.closing(Trainer(mount, names))


source = lasting_source(dict.fromkeys(NAMES, SIZE))


@pytest.fixture(params=[1, 2])
def mount(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Iterator[Mounted]:
    with mounted(source, tmp_path / "m", workers=request.param, capacity="25%", **SLOW) as found:
        eventually(lambda: found.stats()["source_bytes"], what="the size of the source")
        yield found


# With several workers the manager hears of opens out of order, and a trainer may be known to one worker sooner than to
# another. With one, the process that reads answers opens itself. Tests of what the manager alone does with a plan need
# the harder case only.
SEVERAL_WORKERS = pytest.mark.parametrize("mount", [2], indirect=True)


def shuffled(seed: int) -> list[int]:
    return random.Random(seed).sample(range(FILES), FILES)


# A loader without workers, with batches of so many files.
BATCH = 4


def read(
    mount: Mounted, source: Path, numbers: Iterable[int], step_s: float = 0.0, trainer: Trainer | None = None
) -> None:
    """Open files one after the other, and compare their bytes; `trainer` reads them as the next ones of its plan."""
    for place, number in enumerate(numbers := [*numbers]):
        if trainer is not None and place % BATCH == 0:
            trainer.takes(min(BATCH, len(numbers) - place))
        # The time that a training step takes, without which no one could be ahead of it.
        time.sleep(step_s)
        assert (mount.point / NAMES[number]).read_bytes() == (source / NAMES[number]).read_bytes()
    if trainer is not None:
        trainer.took()


def plans(mount: Mounted) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = mount.stats()["plans"]
    return found


def position(mount: Mounted) -> int:
    found = plans(mount)
    return int(found[0]["taken"]) if found else -1


def ready(mount: Mounted) -> int:
    found = plans(mount)
    return int(found[0]["ready_samples"]) if found else -1


@pytest.mark.clock
def test_a_followed_plan_makes_opens_hits(mount: Mounted, source: Path) -> None:
    order = shuffled(1)
    with training(mount) as trainer:
        trainer.plan(order)
        trainer.plan(shuffled(2), epoch=1, begun=False)
        eventually(lambda: ready(mount) >= 20, what="some files ahead")
        before = mount.stats()["metrics"]
        read(mount, source, order, 0.004, trainer)
        after = mount.stats()["metrics"]
        assert after["opens"] - before["opens"] == FILES
        assert after["opens_hit"] - before["opens_hit"] > 0.9 * FILES
        # Nothing was asked for twice, but what is needed for the next epoch.
        assert after["origin_reads"] < 1.3 * FILES
        eventually(lambda: plans(mount)[0]["opens"] == FILES, what="all opens to be known")
        (row,) = plans(mount)
        assert (row["list"], row["epoch"], row["length"], row["epochs_ahead"]) == ("train", 0, FILES, 1)
        assert row["trusted"]
        assert row["followed_share"] > 0.9
        assert row["late_share"] < 0.1
        metrics = mount.stats()["metrics"]
        assert metrics["planned_opens"] == FILES
        assert metrics["planned_late"] < 0.1 * FILES
        assert metrics["prefetched"] > 0.7 * FILES
        assert (row["trainer"], row["dispatched"], row["taken"]) == (1, FILES, FILES)
        assert mount.stats()["fetches_ahead"]["limit"] >= 1
        assert re.search(
            rf"^plan +train, epoch 0: {FILES} of {FILES}, [\d.]+ s ready ahead, ", mount.status(), re.MULTILINE
        )
        trainer.tell(EpochEnd(0, 0.5))
    eventually(lambda: plans(mount) == [], what="the plan to leave with its trainer")


def test_large_files_are_steps_of_the_plan(source: Path, tmp_path: Path) -> None:
    """Only their blocks are read, and those do not say by whom."""
    with mounted(source, tmp_path / "m", sample_max_bytes=SIZE - 1, capacity=FILES * SIZE, **SLOW) as mount:
        order = shuffled(1)
        with training(mount) as trainer:
            trainer.plan(order)
            read(mount, source, order[:100], trainer=trainer)
            eventually(lambda: position(mount) == 100, what="all opens to be known")
            (row,) = plans(mount)
            assert row["trusted"]
            # Workers hear of a trainer a moment after the manager has.
            assert mount.metric("planned_opens") > 90
            assert mount.metric("prefetched") == 0


@SEVERAL_WORKERS
def test_a_wrong_plan_is_dropped_and_reported(mount: Mounted, source: Path) -> None:
    rng = random.Random(3)
    with training(mount) as trainer:
        trainer.plan(shuffled(1))
        for _ in range(2):
            read(mount, source, rng.sample(range(FILES), FILES), trainer=trainer)
            if not plans(mount)[0]["trusted"]:
                break
        (row,) = plans(mount)
        assert not row["trusted"]
        assert "not followed, so the mount ignores it" in mount.status()
        prefetched = eventually(lambda: mount.metric("prefetched") if idle(mount) else None)
        read(mount, source, rng.sample(range(FILES), 100))
        assert mount.metric("prefetched") == prefetched
        # The next one that is followed is acted on again.
        order = shuffled(5)
        trainer.plan(order, epoch=1)
        read(mount, source, order, trainer=trainer)
        eventually(lambda: plans(mount)[0]["trusted"])


def idle(mount: Mounted) -> bool:
    return bool(mount.stats()["fetches_ahead"]["under_way"] == 0)


@SEVERAL_WORKERS
def test_plans_can_be_switched_off_and_on(mount: Mounted, source: Path) -> None:
    order = shuffled(1)
    with training(mount) as trainer:
        trainer.plan(order)
        eventually(lambda: ready(mount) > 0)
        read(mount, source, order[:100], trainer=trainer)
        mount.change("plan", "off")
        assert plans(mount) == []
        trainer.plan(order, position=100)
        read(mount, source, order[100:200], trainer=trainer)
        assert plans(mount) == []
        mount.change("plan", "on")
        trainer.plan(order, position=200)
        eventually(lambda: position(mount) == 200)
        read(mount, source, order[200:], trainer=trainer)
        eventually(lambda: position(mount) == FILES)


@SEVERAL_WORKERS
def test_a_cache_that_shrinks_and_grows_meanwhile(mount: Mounted, source: Path) -> None:
    order = shuffled(1)
    with training(mount) as trainer:
        trainer.plan(order)
        eventually(lambda: ready(mount) > 0)
        for number, capacity in enumerate(["200kB", "40kB", "1MB", "20kB", "25%"]):
            mount.change("capacity", capacity)
            stats = mount.stats()
            assert stats["used_bytes"] <= stats["capacity_bytes"]
            read(mount, source, order[number * 120 : (number + 1) * 120], trainer=trainer)
        eventually(lambda: position(mount) == FILES)
        stats = mount.stats()
        assert stats["used_bytes"] <= stats["capacity_bytes"]


# Reads a list in its order for a plan of its own, as another training on the same mount.
_OTHER_TRAINING = """
import sys, time
sys.path[:0] = sys.argv[1:3]
from types import SimpleNamespace
from pathlib import Path
from test_plan import NAMES, Trainer, shuffled
point, source = Path(sys.argv[3]), Path(sys.argv[4])
order = shuffled(int(sys.argv[5]))
trainer = Trainer(SimpleNamespace(control=lambda name: point / ".spiderfs" / name), NAMES)
trainer.plan(order)
print("planned", flush=True)
sys.stdin.readline()
for number in order:
    trainer.takes(1)
    time.sleep(0.006)
    assert (point / NAMES[number]).read_bytes() == (source / NAMES[number]).read_bytes()
trainer.took()
print("read", flush=True)
sys.stdin.readline()
"""


@SEVERAL_WORKERS
def test_two_trainings_with_plans_of_their_own(mount: Mounted, source: Path) -> None:
    here = Path(__file__).parent
    arguments: list[str | Path] = [here, here.parent, mount.point, source]
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(
                program(
                    *(sys.executable, "-c", _OTHER_TRAINING, *arguments, str(seed)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for seed in (11, 12)
        ]
        for word in ("planned", "read"):
            for other in others:
                assert other.stdout is not None
                assert other.stdin is not None
                assert other.stdout.readline() == f"{word}\n"
            if word == "read":
                eventually(lambda: [row["taken"] for row in plans(mount)] == [FILES, FILES])
                rows = plans(mount)
            for other in others:
                assert other.stdin is not None
                other.stdin.write("\n")
                other.stdin.flush()
        assert [other.wait(30) for other in others] == [0, 0]
    assert [row["trusted"] for row in rows] == [True, True]
    # Workers learn within 20 ms who is attached; what is opened sooner is no one's.
    assert all(row["opens"] > FILES - 10 for row in rows)
    assert mount.metric("opens") == 2 * FILES
    assert mount.metric("hit_ratio") > 0.7
    eventually(lambda: plans(mount) == [])
