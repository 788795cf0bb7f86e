"""The sentence with which `spiderfs bench` and `spiderfs profile` end: what to mount with, and why."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from commands import mount_table, refusal
from made_up_profile import MADE_UP
from PIL import Image

from benchmarks.fakes.memory_source import MemorySource
from spiderfs.cli.bench import _options
from spiderfs.cli.profile import advice
from spiderfs.errors import UsageError
from spiderfs.forms.profile import Cost, Reads, SourceSpeed
from spiderfs.options.model import Options
from spiderfs.profiling.bench import (
    BenchFindings,
    File,
    FoundFiles,
    ReadPass,
    Speed,
    Way,
    _forget,
    _rounds,
    _Steps,
    cached_share,
    list_files,
    short_side,
)
from spiderfs.profiling.measure import Speeds
from spiderfs.sources.source import Version
from spiderfs.views.recipe import NO_VIEW


def speed(*per_s: float) -> Speed:
    return Speed([ReadPass(round(10 * rate), round(1e6 * rate), 0, 10.0) for rate in per_s])


def steady(per_s: float) -> Speed:
    return speed(0.99 * per_s, per_s, 1.01 * per_s)


def found(local: float, direct: float, images: bool = True, **mounted: float) -> BenchFindings:
    speeds = {"loader": steady(local), "source": steady(4 * direct), "direct": steady(direct)}
    speeds |= {way: steady(per_s) for way, per_s in mounted.items()}
    speeds |= {f"loader, {way}": steady(2 * local) for way in mounted if way.endswith("256")}
    return BenchFindings("/nfs/a", 1000, 10**8, True, 8, 0.2, "20%", images, 500, False, speeds)


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (
            found(560, 78, lru=80, plan=210),
            "your loader decodes 560 ± 14 images/s from memory and 78 ± 2.0 from the source: mount with -o"
            " immutable,capacity=20% and give the training trainer_hook.plan(); expect 210 ± 5.2 images/s, 80 ± 2.0"
            " with an LRU cache",
        ),
        (
            found(560, 78, lru=100, plan=101),
            "your loader decodes 560 ± 14 images/s from memory and 78 ± 2.0 from the source: mount with -o"
            " immutable,capacity=20%; expect 100 ± 2.5 images/s",
        ),
        (
            found(500, 480, lru=460, plan=480, bmp256=900, jpeg256=520),
            "your loader decodes 500 ± 12 images/s from memory and 480 ± 12 from the source: mount with -o"
            " immutable,capacity=20%,view=bmp256 and give the training trainer_hook.plan(); expect 900 ± 22 images/s,"
            " 460 ± 11 with an LRU cache, 480 ± 12 with a plan alone. This view replaces the images by smaller ones,"
            " of 256 pixels",
        ),
        (
            found(560, 550, images=False, lru=500, plan=540),
            "your loader reads 560 ± 14 files/s from memory and 550 ± 14 from the source: read the source directly,"
            " because the loader hardly waits for it",
        ),
        (
            found(560, 8.5, lru=8, plan=9),
            "your loader decodes 560 ± 14 images/s from memory and 8.5 ± 0.2 from the source: no mount gains 15%: a"
            " larger cache may help, or more loader workers",
        ),
    ],
)
def test_bench_says_what_to_mount_with_and_why(measured: BenchFindings, says: str) -> None:
    assert measured.verdict() == says


def test_inside_the_noise_there_is_no_verdict() -> None:
    varying = {
        "loader": steady(500),
        "source": steady(900),
        "direct": speed(100, 180, 140),
        "lru": speed(150, 230, 190),
    }
    measured = replace(found(500, 100), speeds=varying)
    assert (measured.best(), measured.unclear) == (None, True)
    assert "no verdict, because rates vary more than the ways differ" in measured.verdict()
    # More passes tell the same ways apart.
    more = varying | {"direct": speed(*(100, 180, 140) * 2), "lru": speed(*(190, 270, 230) * 2)}
    assert replace(measured, speeds=more).best() == "lru"


def test_a_view_is_tried_of_larger_images_alone(tmp_path: Path) -> None:
    Image.new("RGB", (80, 40)).save(tmp_path / "a.png")
    assert short_side(str(tmp_path / "a.png")) == 40
    (tmp_path / "b").write_text("no image")
    assert short_side(str(tmp_path / "b")) == 0


def test_rounds_go_on_until_the_ways_can_be_told_apart_and_say_how_far_they_are() -> None:
    def measured(direct: Sequence[int], lru: Sequence[int]) -> tuple[int, list[str]]:
        rates = {"loader": iter([500] * 9), "direct": iter(direct), "lru": iter(lru)}
        ways = {way: partial(lambda of_way: ReadPass(next(of_way), 0, 0, 1.0), of_way) for way, of_way in rates.items()}
        said: list[str] = []
        done = _rounds(ways, _Steps(said.append), lambda speeds: replace(found(1, 1), speeds=speeds))
        return len(done.direct.passes), said

    count, said = measured([100, 101, 102], [200, 201, 202])
    assert count == 3
    assert [line.rpartition(",")[0] for line in said] == [f"{n} of 6: round {n} of all ways" for n in (1, 2, 3)]
    assert re.fullmatch(r" at most \d+ s left", said[0].rpartition(",")[2])
    assert measured([100, 120, 110] * 2, [150, 200, 175] * 2)[0] == 4
    assert measured([100, 180, 140] * 2, [130, 230, 180] * 2)[0] == 6


def test_the_share_that_is_cached_follows_from_the_capacity(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "mnt").mkdir()

    def options(capacity: str) -> Options:
        given = [f"capacity={capacity},cache_dir={tmp_path}/cache"]
        return Options.load(given, None, tmp_path / "source", tmp_path / "mnt")

    assert cached_share(options("30%"), FoundFiles([], 10, False)) == pytest.approx(0.3)
    assert cached_share(options("500"), FoundFiles([], 1000, True)) == 0.5
    assert cached_share(options("5000"), FoundFiles([], 1000, True)) == 1.0
    with pytest.raises(UsageError, match="write it as percent, capacity=20%"):
        cached_share(options("500"), FoundFiles([], 1000, False))


def test_a_mount_is_measured_by_its_source_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, point = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    (point / ".spiderfs").mkdir(parents=True)
    theirs = {
        "source": source,
        "cache_dir": "/in/use",
        "capacity": "50%",
        "source.latency_ms": 7,
        "source.endpoint": "",
    }
    config = "".join(f"{name}={value}  # help\n" for name, value in theirs.items())
    (point / ".spiderfs/config").write_text(config)
    mount_table(monkeypatch, tmp_path, f"101 27 0:50 / {point} ro - fuse.spiderfs {source} ro")
    (tmp_path / "scratch").mkdir()
    options = _options(str(point), (), str(tmp_path / "scratch"))
    assert (options.source, options.source_latency_ms, str(options.capacity)) == (source, 7.0, "50%")
    assert options.immutable


def test_all_small_files_are_listed() -> None:
    source = MemorySource()
    source.add_directory(b"a")
    source.add_directory(b"a/b")
    for path in (b"a/1", b"a/b/2", b"3"):
        source.add(path, b"x" * 10)
    source.add(b"a/large", b"x" * 100)
    source.add(b"a/empty")
    listing = list_files(source, 50)
    assert ({file.path for file in listing.files}, listing.bytes, listing.whole) == ({b"a/1", b"a/b/2", b"3"}, 30, True)


def test_what_cannot_be_measured_is_refused_in_one_line(tmp_path: Path) -> None:
    for directory, says in ((tmp_path / "absent", "does not exist"), (tmp_path, "0 files of up to 8.0 MiB, too few")):
        assert says in refusal("bench", directory, "-o", f"cache_dir={tmp_path.parent}/c")
    assert "leave out archives" in refusal("bench", tmp_path, "-o", f"archives=tar,cache_dir={tmp_path.parent}/c")


def test_profile_ends_with_what_to_mount_with() -> None:
    speeds = Speeds(MADE_UP.source, {NO_VIEW: Reads(10, 1_000_000, 0.01)}, 1000)
    said = "the source gives 500 files/s: for mount options, name your loader with --loader"
    assert advice(speeds, None).startswith(said)
    assert advice(speeds, MADE_UP) == (
        "your loader makes 500 samples/s of cached originals, the source gives 500 files/s: cache originals alone;"
        " expect 143 samples/s, and 500 with trainer_hook.plan()"
    )
    fast = SourceSpeed(0.0005, 8, 1e9)
    near = replace(MADE_UP, uncached=Cost(0.004, 0.0005, 0.0), cache_bytes=400e6, source=fast)
    assert "mount with -o view=bmp256,forms=45-55-0; expect 2,000 samples/s in place of 500" in advice(speeds, near)


def test_what_was_read_before_is_read_from_the_source(tmp_path: Path) -> None:
    content = b"x" * 100_000
    for name in "ab":
        with open(tmp_path / name, "wb") as file:
            file.write(content)
            os.fsync(file.fileno())
    files = [File(name, Version(len(content), 0)) for name in (b"a", b"b", b"gone")]
    assert _forget(Way(str(tmp_path)), files) == 3
    shown = subprocess.run(["fincore", "-n", "-b", "-o", "RES", tmp_path / "a", tmp_path / "b"], capture_output=True)
    assert shown.stdout.split() == [b"0", b"0"]
    assert _forget(Way(str(tmp_path)), files, limit_s=-1) == 0
    assert _forget(Way(named="s3://bucket"), files) == 3
