"""The schedule of a soak: what happens and when, drawn from one seed. The module has no side effects.

A run consists of stretches. In each stretch, three lanes of events go on side by side: changes at the source, events of
the mount, and trainers. At the end of a stretch all faults end, and the mount is compared with the source. The readers
read all the time, and draw what they do from seeds of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

CLASSES = 6
# The numbers of small and of large files; the option `sample_max_bytes` of the mounts lies between their sizes. Between
# them come the members of an archive, a class of its own, which never change; nor do photos, which are shown as views.
SMALL, ARCHIVED, LARGE = 150, 40, 8
ARCHIVE, VIEW = f"{CLASSES}.tar", "jpeg256"
PHOTOS = tuple(f"photos/{number:06}.jpg" for number in range(6))
# In so many runs packages take the place of both: they are made of files alone, as they are.
PACKAGED_SHARE = 0.25
# The first small files and the last large files are read most, and half of all changes are theirs.
HOT_SMALL, HOT_LARGE = 12, 2
SMALL_BYTES, LARGE_BYTES = 200_000, 5 << 20
SAMPLE_MAX_BYTES = 256 << 10
STRETCH_S = 45.0
# After a stretch it takes about so long until all names have expired and all files have been compared.
CALM_S = 14.0
# The mean seconds between two events of a lane.
CHANGE_S, MOUNT_S, TRAINER_S = 0.2, 0.7, 6.0
TIMEOUT_S = 3.0  # source.timeout_s
# A mount trusts a name for at most so long.
TTL_S = 3.0
READERS = 4


class Event(NamedTuple):
    at_s: float  # since its stretch began
    kind: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class File:
    number: int
    path: str
    label: int
    size: int

    @property
    def is_archived(self) -> bool:
        return self.path.startswith(ARCHIVE)


@dataclass(frozen=True)
class Stretch:
    seconds: float
    changes: list[Event]
    mount: list[Event]
    trainers: list[Event]


@dataclass(frozen=True)
class Schedule:
    files: list[File]
    options: dict[str, str]
    stretches: list[Stretch]


def schedule(seed: int, seconds: float) -> Schedule:
    """The schedule of a seed and a length in seconds, in which the calm after each stretch is included."""
    rng = random.Random(seed)
    packaged = rng.random() < PACKAGED_SHARE
    files = [file for file in _files(rng) if not (packaged and file.is_archived)]
    count = max(1, round(seconds / (STRETCH_S + CALM_S)))
    stretches = [_stretch(rng, max(1.0, seconds / count - CALM_S), files, packaged) for _ in range(count)]
    return Schedule(files, _mount_options(rng, packaged), stretches)


def _files(rng: random.Random) -> Iterator[File]:
    for number in range(1, SMALL + ARCHIVED + LARGE + 1):
        archived, large = SMALL < number <= SMALL + ARCHIVED, number > SMALL + ARCHIVED
        label = CLASSES if archived else number % CLASSES
        name = f"{'large' if large else 'small'}-{number:03}.bin"
        yield File(number, f"{ARCHIVE if archived else label}/{name}", label, _size(rng, large))


def _size(rng: random.Random, large: bool) -> int:
    if large:
        return rng.randrange(SAMPLE_MAX_BYTES + 1, LARGE_BYTES)
    return rng.choice((0, 1, 15, 16, 4095, 4096, 4097, 131072, *(rng.randrange(1, SMALL_BYTES) for _ in range(16))))


def _mount_options(rng: random.Random, packaged: bool) -> dict[str, str]:
    """The options with which the mount begins."""
    return {
        "workers": str(rng.choice((1, 1, 2, 3))),
        "policy": rng.choice(("spider", "lru", "lfu", "minio", "shade", "impact")),
        **({"packages": "source"} if packaged else {"archives": "tar", "view": VIEW}),
        "fetches": str(rng.choice((2, 8, 16))),
        "read_ahead": str(rng.choice((0, 2, 8))),
        "sample_max_bytes": str(SAMPLE_MAX_BYTES),
        "ttl": "1s",
        "negative_ttl": "0.5s",
        "dir_ttl": "0.5s",
        "capacity": rng.choice(CAPACITIES),
        "source.timeout_s": f"{TIMEOUT_S:g}",
        "source.attempts": "3",
        "source.latency_ms": "1",
    }


CAPACITIES = ("200kB", "3MB", "8MB", "30%", "64MB")
# (weight, what, arguments)
_CHANGES: tuple[tuple[int, str], ...] = (
    (30, "replace"),  # a new file takes the name
    (14, "overwrite"),  # in place, in pieces
    (8, "map"),  # in place, through mmap
    (10, "append"),
    (8, "truncate"),
    (6, "lengthen"),  # by a hole
    (6, "delete"),
    (6, "old mtime"),  # the same bytes
    (6, "future mtime"),
    (6, "kept mtime"),  # other bytes with size and mtime of the present ones
)
_SETTINGS: dict[str, tuple[str, ...]] = {
    "capacity": CAPACITIES,
    "policy": ("spider", "lru", "lfu", "minio", "shade", "impact", "icache"),
    "ttl": ("0s", "0.5s", "1s", "3s"),
    "negative_ttl": ("0s", "0.5s"),
    "dir_ttl": ("0s", "0.5s", "1s"),
    "plan": ("off", "on"),
    "substitute_when": ("late", "miss"),
    "ratio_start": ("0.5", "0.9"),
    "source.latency_ms": ("0", "1", "30"),
    "source.bandwidth": ("0", "100MB"),
}
# The faults of the source, and for how many seconds each lasts at most.
_FAULTS: tuple[tuple[str, str, str, float], ...] = (
    ("source.error_rate", "0.3", "0", 4.0),
    ("source.error_rate", "1", "0", 3.0),
    ("source.gone", "on", "off", 3.0),
    ("source.hang", "on", "off", 3.0),
    ("source.latency_ms", "400", "1", 3.0),
)
_MOUNT: tuple[tuple[int, str], ...] = (
    (24, "set"),
    (14, "fault"),
    (8, "warm"),
    (8, "evict"),
    (6, "look"),  # read all control files
    (7, "kill worker"),
    (6, "kill manager"),
    (5, "kill reading process"),
    (3, "stop manager"),
    (4, "kill reader"),
    (2, "kill supervisor"),
    (2, "unmount"),
)


def _drawn(rng: random.Random, table: tuple[tuple[int, str], ...]) -> str:
    return rng.choices([what for _, what in table], [weight for weight, _ in table])[0]


def _stretch(rng: random.Random, seconds: float, files: list[File], packaged: bool) -> Stretch:
    loose = [file for file in files if not file.is_archived]
    changes = [Event(at, _drawn(rng, _CHANGES), _change(rng, loose)) for at in _times(rng, CHANGE_S, seconds)]
    mount: list[Event] = []
    busy_until = 0.0
    for at in _times(rng, MOUNT_S, seconds):
        if at < busy_until:
            continue
        kind = _drawn(rng, _MOUNT)
        arguments, takes_s = _what_happens(rng, kind, files, packaged)
        if kind == "fault":
            takes_s = min(takes_s, seconds - at)
            arguments["for_s"] = takes_s
        mount.append(Event(at, kind, arguments))
        busy_until = at + takes_s
    return Stretch(seconds, changes, mount, list(_trainers(rng, seconds)))


def _times(rng: random.Random, mean_s: float, seconds: float) -> Iterator[float]:
    at = rng.expovariate(1 / mean_s)
    while at < seconds:
        yield at
        at += rng.expovariate(1 / mean_s)


def _change(rng: random.Random, files: list[File]) -> dict[str, Any]:
    file = rng.choice(files[:HOT_SMALL] + files[-HOT_LARGE:]) if rng.random() < 0.5 else rng.choice(files)
    large = file.size > SMALL_BYTES
    return {
        "file": file.number,
        "size": _size(rng, large),
        "begin": rng.random(),  # as a share of the file
        "length": rng.random(),
        "pieces": rng.choice((1, 1, 1, 2, 5)),
        "pause_s": rng.choice((0.0, 0.0, 0.01, 0.2)),
        "age_s": rng.choice((1.0, 60.0, 1e6, 3e9)),
    }


def _what_happens(rng: random.Random, kind: str, files: list[File], packaged: bool) -> tuple[dict[str, Any], float]:
    """The arguments of an event, and the seconds in which nothing else happens to the mount."""
    if kind == "set":
        name = rng.choice(list(_SETTINGS))
        return {"name": name, "value": rng.choice(_SETTINGS[name])}, 0.0
    if kind == "fault":
        name, value, back, most_s = rng.choice(_FAULTS)
        for_s = rng.uniform(0.2, most_s)
        return {"name": name, "value": value, "back": back}, for_s
    if kind in ("warm", "evict"):
        return {"line": rng.choice(("**", f"{rng.randrange(CLASSES)}", "*/large-*", rng.choice(files).path))}, 0.0
    if kind == "stop manager":
        return {"for_s": rng.uniform(0.2, 2.0)}, 2.0
    if kind in ("kill worker", "kill reading process", "kill reader"):
        return {"which": rng.random()}, 1.0
    if kind in ("kill supervisor", "unmount"):
        return {"options": _mount_options(rng, packaged)}, 5.0
    return {}, 0.5


def _trainers(rng: random.Random, seconds: float) -> Iterator[Event]:
    for at in _times(rng, TRAINER_S, seconds):
        yield Event(
            at,
            "trainer",
            {
                "seed": rng.randrange(1 << 30),
                "for_s": rng.uniform(2.0, 15.0),
                "samples": rng.choice((20, 80, SMALL + LARGE)),
                "ranges": rng.random() < 0.5,
                "end": rng.choice(("goodbye", "goodbye", "hang up", "kill")),
                "plans": rng.choice(("true", "true", "wrong", "none")),
                "forks": rng.random() < 0.5,
                "garbage": rng.random() < 0.2,
            },
        )
