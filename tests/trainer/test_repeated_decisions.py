"""A recorded training, repeated from its trace alone, takes the very same decisions as the mount took."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from known_losses import Training
from mounting import Mounted, eventually, mounted
from reading import source_with
from repetition import repeated

from spiderfs.core.events import Epoch, Lost, Published, Ratio
from spiderfs.core.policy import Policy
from spiderfs.policies import POLICIES
from spiderfs.trace import Trace, read_trace

SAMPLES, CLASSES, BATCH, EPOCHS = 150, 3, 10, 4
NAMES = [f"{number:03d}" for number in range(SAMPLES)]
LABELS = (np.arange(SAMPLES) % CLASSES).astype(np.int32)


class Decided(NamedTuple):
    """What the mount keeps, in which sections, and what it tells workers; files by their inodes."""

    members: dict[int, str]
    redirects: dict[int, int]
    ratio: str


SIZES = np.random.default_rng(1).integers(500, 1500, SAMPLES)
source = source_with({name: b"%08d" % number + bytes(SIZES[number]) for number, name in enumerate(NAMES)})


def _ratio_text(ratio: float | None) -> str:
    return "none" if ratio is None else f"{ratio:.4f}"


def decided_by(mount: Mounted, inodes: dict[str, int]) -> Decided:
    rows = (line.split() for line in mount.control("cache").read_text().splitlines())
    members = {inodes[path]: section for section, _, _, path in rows if section != "landing"}
    pairs = (line.split(" ", 1)[1].split(" -> ") for line in mount.control("redirects").read_text().splitlines())
    redirects = {inodes[wanted]: inodes[given] for wanted, given in pairs}
    return Decided(members, redirects, _ratio_text(mount.stats()["ratio"]["ratio"]))


def decided_again(trace: Trace, policy: Policy) -> Decided:
    engine, table = repeated(trace, policy)
    members = {int(str(key)): member.section for key, member in engine.members.items()}
    redirects = {int(str(wanted)): int(str(given)) for (_, wanted), given in table.items()}
    return Decided(members, redirects, _ratio_text(policy.ratio))


def up_to(trace: Trace, epochs: int, accesses: int) -> Trace:
    """The trace up to the end of so many epochs, with so many accesses."""
    events = trace.events
    end = [number for number, (_, event) in enumerate(events) if isinstance(event, Epoch)][epochs - 1]
    accesses = max(accesses, events[end][0])
    while end + 1 < len(events):
        before, event = events[end + 1]
        if before >= accesses and not (before == accesses and isinstance(event, Ratio | Lost | Published)):
            break
        end += 1
    return Trace({name: column[:accesses] for name, column in trace.columns.items()}, events[: end + 1], recorded=True)


@pytest.mark.parametrize("policy", ["spider", "shade", "impact"])
@pytest.mark.opened_and_immutable
def test_a_trace_repeats_what_the_mount_decided(source: Path, tmp_path: Path, policy: str, binding: str) -> None:
    options: dict[str, object] = {"plan": "off", "substitute_when": "miss", "ratio_start": 0.7, "ratio_end": 0.3}
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((CLASSES, 8))[LABELS] + 0.2 * rng.standard_normal((SAMPLES, 8))
    losses = rng.permutation(np.linspace(0.1, 2, SAMPLES))
    reads, path, decided = 0, tmp_path / "trace", list[tuple[int, Decided]]()
    # Room for a fifth of the samples, of which two are pushed out of landing now and then.
    with mounted(source, tmp_path, capacity="40KiB", policy=policy, trace=path, **options) as mount:
        # Before this process is a trainer, which looks up substitutes.
        inodes = {name: (mount.point / name).stat().st_ino for name in NAMES}
        training = Training(mount.point, NAMES, LABELS, losses, BATCH, vectors)
        for epoch in range(EPOCHS):
            training.epoch()
            reads += sum(training.given.values())
            if binding == "immutable":
                # There a look-up tells what was given, and the READ of the substitute is told besides.
                reads += sum(count for (wanted, given), count in training.given.items() if wanted != given)
            training.given.clear()
            eventually(lambda reads=reads: mount.metric("events_folded") == reads, what="all events")
            if epoch == 1:
                if policy == "spider":
                    mount.control("ratio").write_bytes(b"0.5\n")
                mount.control("evict").write_bytes(b"0*\n")
                eventually(lambda: not mount.control("evict").read_bytes().startswith(b"0 "), what="evictions")
            decided.append((reads, decided_by(mount, inodes)))
        training.close()
        if policy != "shade":
            assert mount.metric("redirects") > 3
    trace = read_trace(path)
    for epochs, (accesses, expected) in enumerate(decided, 1):
        again = decided_again(up_to(trace, epochs, accesses), POLICIES[policy]())
        assert again == expected
    assert len(decided[-1][1].members) > 10
    if policy == "spider":
        assert "homophily" in decided[-1][1].members.values()
