"""What a profile predicts from its figures, and how the speed of a source is found out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_up_profile import MADE_UP

from spiderfs.errors import UsageError
from spiderfs.forms.partition import Split
from spiderfs.forms.profile import Cost, Reads, SourceSpeed
from spiderfs.profiling.measure import Loader, LoaderProcess, Speeds, Wanted, _originals, files_below, source_speed
from spiderfs.profiling.private_mount import PrivateMount, settings_in
from spiderfs.views.recipe import NO_VIEW

ENCODED, DECODED, AUGMENTED = Split(1, 0, 0), Split(0, 1, 0), Split(0, 0, 1)


def test_waits_and_work_of_the_workers_add_up() -> None:
    prediction = MADE_UP.predicted(ENCODED, "bmp256")
    assert prediction.bottleneck == "workers"
    assert prediction.samples_per_s == pytest.approx(2 / (0.5 * 0.004 + 0.5 * 0.024))


def test_a_slow_source_wants_originals_and_a_slow_processor_views() -> None:
    assert MADE_UP.best("bmp256") == ENCODED
    near = replace(MADE_UP, uncached=Cost(0.004, 0.0005, 0.0), source=SourceSpeed(0.0005, 8, 1e9))
    assert near.best("bmp256") == DECODED


def test_with_plans_only_the_bandwidth_of_the_source_counts() -> None:
    planned = replace(MADE_UP, planned=True).predicted(DECODED, "bmp256")
    # Nearly a quarter of the samples is decoded; the rest takes 4 ms each of two workers.
    counts = MADE_UP.counts(DECODED, "bmp256")
    decoded = counts.decoded / 1000
    assert 0.2 < decoded < 0.25
    assert planned.samples_per_s == pytest.approx(2 / (decoded * 0.001 + (1 - decoded) * 0.004))
    narrow = replace(MADE_UP, planned=True, source=SourceSpeed(0.020, 8, 10e6)).predicted(DECODED, "bmp256")
    assert narrow.bottleneck == "storage_bandwidth"
    assert narrow.samples_per_s == pytest.approx(10e6 / 100e3 / (counts.storage / 1000))


def test_augmented_samples_are_worth_nothing_if_they_are_used_once() -> None:
    # They leave a twentieth of the cache for originals.
    little = replace(MADE_UP, cache_bytes=0.05 * MADE_UP.cache_bytes / 0.95).predicted(ENCODED, None).samples_per_s
    assert MADE_UP.predicted(AUGMENTED, None).samples_per_s < little
    used = replace(MADE_UP, uses=5.0, cache_bytes=200e6).predicted(AUGMENTED, None)
    assert used.samples_per_s == pytest.approx(2 / (0.001 + 0.024 / 5))


def test_what_it_takes_to_keep_an_augmented_sample_is_shared_by_its_uses() -> None:
    kept = replace(MADE_UP, uses=5.0, cache_bytes=200e6, keeping=Cost(0.002, 0.0, 0.010))
    assert kept.predicted(AUGMENTED, None).samples_per_s == pytest.approx(2 / (0.001 + 0.026 / 5))
    crowded = replace(kept, cores=1).predicted(AUGMENTED, None)
    assert crowded == (pytest.approx(1 / (0.001 + (0.004 + 0.001 + 0.002 + 0.010) / 5)), "cores")
    assert kept.predicted(ENCODED, None) == replace(kept, keeping=MADE_UP.keeping).predicted(ENCODED, None)


def test_machines_add_cores_and_caches_and_share_the_source() -> None:
    alone, four = MADE_UP, replace(MADE_UP, nodes=4)
    rates = [found.predicted(ENCODED, None).samples_per_s for found in (alone, four)]
    assert rates[1] == pytest.approx(4 * rates[0])
    assert four.counts(ENCODED, None) == alone.counts(ENCODED, None)
    # Half of the samples come from a source that brings 500 a second to all of them together.
    many = replace(MADE_UP, nodes=40).predicted(ENCODED, None)
    assert many == (pytest.approx(1000), "storage_bandwidth")
    stepping = replace(four, step_s=1.0, cache_bytes=1e9).predicted(ENCODED, None)
    assert stepping == (pytest.approx(40), "device_rate")


def test_a_cache_gives_no_more_than_it_was_measured_to_give() -> None:
    slow = replace(MADE_UP, cache_bytes=200e6, encoded=replace(MADE_UP.encoded, reads=Reads(10, 1_000_000, 0.1, 2)))
    assert slow.predicted(ENCODED, None) == (pytest.approx(100), "caches")
    assert replace(slow, nodes=3).predicted(ENCODED, None) == (pytest.approx(300), "caches")
    # Augmented samples, of which no reads were measured, come as fast by the byte: 10 MB a second.
    used = replace(slow, uses=1e9, cache_bytes=1e9)
    assert used.predicted(AUGMENTED, None) == (pytest.approx(10e6 / 150e3), "caches")
    # Fewer readers than workers say nothing of what the cache gives to all of them.
    assert replace(slow, workers=3).predicted(ENCODED, None).bottleneck == "workers"


def test_the_network_brings_originals_from_the_source_and_gradients() -> None:
    narrow = replace(MADE_UP, planned=True, network_bandwidth=10e6)
    # Half of the samples are cached on the machine itself.
    assert narrow.predicted(ENCODED, None) == (pytest.approx(10e6 / 50e3), "network_bandwidth")
    two = replace(narrow, nodes=2, model_bytes=5e6, cache_bytes=200e6)
    # A ring of two moves the model's size once for each batch of 10.
    assert two.gradient_bytes == pytest.approx(0.5e6)
    assert two.predicted(ENCODED, None) == (pytest.approx(2 * 10e6 / 0.5e6), "network_bandwidth")
    assert replace(narrow, model_bytes=5e6).gradient_bytes == 0


def test_steps_are_a_limit_and_add_up_with_the_samples_where_there_are_no_workers() -> None:
    slow = replace(MADE_UP, step_s=1.0)
    assert slow.predicted(ENCODED, None) == (pytest.approx(10), "device_rate")
    alone = replace(slow, workers=0, cache_bytes=200e6).predicted(ENCODED, None)
    assert alone == (pytest.approx(1 / (0.1 + 0.004)), "workers")


def test_a_cache_holds_less_than_the_equations_say() -> None:
    pure, mixed = (MADE_UP.counts(split, "bmp256") for split in (ENCODED, Split(0.4, 0.3, 0.3)))
    assert pure == (0, 0, pytest.approx(500), pytest.approx(500))
    landing = 0.05 * MADE_UP.cache_bytes
    assert mixed.augmented == pytest.approx(0.3 * MADE_UP.cache_bytes / 150e3)
    fit = 0.97 * 3 / 7 * (0.7 * MADE_UP.cache_bytes - landing) / 200e3
    assert mixed.decoded == pytest.approx(fit - 2 * (fit * (1 - fit / 1000)) ** 0.5, rel=1e-3)
    room = 0.7 * MADE_UP.cache_bytes - landing - mixed.decoded * 200e3
    assert mixed.encoded == pytest.approx(room / 100e3, rel=1e-3)
    # Some of the capacity stays for what is fetched, and where all are augmented, what is left is for originals.
    assert MADE_UP.counts(AUGMENTED, None).augmented == pytest.approx(0.9 * MADE_UP.cache_bytes / 150e3)
    assert replace(MADE_UP, cache_bytes=400e6).counts(AUGMENTED, None).augmented == 1000


def test_options_are_read_from_the_control_file() -> None:
    text = "# the last change was refused:\n# why\ncapacity=20%  # how much; live\nview=none  # what  # is shown\n"
    assert settings_in(text) == {"capacity": "20%", "view": "none"}


def test_the_speed_of_a_source_of_few_files_is_that_of_one_reader(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(18):
        (tmp_path / "a" / f"{number:02d}").write_bytes(bytes(1000))
    files = files_below(tmp_path, 100)
    assert [path.name for path in files] == [f"{number:02d}" for number in range(18)]
    assert files_below(tmp_path, 3) == files[:3]
    # Of 18 files, 16 are read by one reader; for two readers there should be four more.
    found = source_speed(files, 16)
    assert found.readers == 1
    assert found.latency_s > 0
    assert found.bytes_per_s > 0


class NothingRead(PrivateMount):
    def bytes_of_a_sample(self) -> float:
        return 0.0

    def cpu_s(self) -> float:
        return 0.0


class Answers(LoaderProcess):
    def __init__(self) -> None:
        pass

    def ask(self, **question: object) -> dict[str, object]:
        return {"samples": 4, "worker_cpu_s": 1.0, "worker_wait_s": 0.0, "main_cpu_s": 0.0, "kept_bytes": 0}


def test_a_loader_that_reads_nothing_of_the_mount_is_refused() -> None:
    loader = Loader(Answers(), NothingRead(Path("/mnt"), 1), 8, 1, 4, False)
    speeds = Speeds(SourceSpeed(0.01, 1, 1e6), {NO_VIEW: Reads(1, 1, 1.0)}, 8)
    with pytest.raises(UsageError, match="has read nothing from the mount"):
        _originals(loader, Cost(1.0, 0.0, 0.0), speeds, 1e6, Wanted("train:make", (), 4, False, 1.0))


class InSteps(Answers):
    """A loader whose worker takes 1 s for a sample, 0.5 s for one that was kept, and 0.25 s more to keep it."""

    def ask(self, **question: object) -> dict[str, object]:
        worker_s = {"no": 4.0, "read": 2.0, "again": 3.0}[str(question["kept"])]
        return {"samples": 4, "worker_cpu_s": worker_s, "worker_wait_s": 0.0, "main_cpu_s": 0.0, "kept_bytes": 40}


class Read(NothingRead):
    def bytes_of_a_sample(self) -> float:
        return 100.0


def test_what_keeping_takes_is_told_from_reading_and_a_rate_stands_for_a_step() -> None:
    loader = Loader(InSteps(), Read(Path("/mnt"), 1), 8, 1, 4, False)
    speeds = Speeds(SourceSpeed(0.01, 1, 1e6), {NO_VIEW: Reads(1, 1, 1.0)}, 8)
    found = _originals(
        loader, Cost(1.0, 0.0, 0.0), speeds, 1e6, Wanted("train:make", (), 4, False, 1.0, rate=50.0, nodes=3)
    )
    assert (found.encoded.cost.cpu_s, found.augmented.cost.cpu_s, found.keeping.cpu_s) == (1.0, 0.5, 0.25)
    assert found.augmented.sample_bytes == 10
    assert (found.device_rate, found.nodes) == (50, 3)
