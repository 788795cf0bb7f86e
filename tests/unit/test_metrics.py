"""Counters that all processes share, their text for Prometheus, and their documentation."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spiderfs.metrics import (
    BUCKETS_US,
    COUNTERS,
    DIRECTORY_UP,
    GAUGES,
    HISTOGRAMS,
    MOUNT_UP,
    PEER_COUNTERS,
    PEER_UP,
    SECTION_BYTES,
    SharedCounters,
    prometheus_text,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_rows_are_summed_and_do_not_touch_each_other() -> None:
    shared = SharedCounters(3)
    for definition in COUNTERS:
        shared.row(0).add(definition.name)
        shared.row(1).add(definition.name, 1 << 40)
    assert shared.totals() == {definition.name: 1 + (1 << 40) for definition in COUNTERS}
    assert all(shared.histogram(definition.name) == ([0] * (len(BUCKETS_US) + 1), 0.0) for definition in HISTOGRAMS)
    assert shared.source_reachable()


def test_an_unknown_name_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        SharedCounters(1).row(0).add("opnes")


def test_what_children_count_outlives_them() -> None:
    shared = SharedCounters(4)
    children = []
    for row in range(4):
        child = os.fork()
        if child == 0:
            try:
                counters = shared.row(row)
                for _ in range(10_000):
                    counters.add("opens")
                counters.observe("open_hit_seconds", 0.001)
            finally:
                # As abruptly as a process that is killed.
                os._exit(1)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert shared.totals()["opens"] == 40_000
    assert sum(shared.histogram("open_hit_seconds")[0]) == 4


def test_the_source_is_reachable_while_no_process_finds_otherwise() -> None:
    shared = SharedCounters(2)
    shared.row(0).set_source_reachable(False)
    assert not shared.source_reachable()
    shared.row(1).set_source_reachable(True)
    assert not shared.source_reachable()
    shared.row(0).set_source_reachable(True)
    assert shared.source_reachable()


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (10e-6, 0), (11e-6, 1), (0.1, 12), (0.5, 13), (10.0, 14), (10.1, 15), (3600.0, 15)],
)
def test_a_duration_goes_into_its_bucket(seconds: float, bucket: int) -> None:
    shared = SharedCounters(1)
    shared.row(0).observe("open_miss_seconds", seconds)
    counts, total = shared.histogram("open_miss_seconds")
    assert counts.index(1) == bucket
    assert sum(counts) == 1
    assert total == pytest.approx(seconds, abs=1e-6)
    assert sum(shared.histogram("open_hit_seconds")[0]) == 0


def test_the_text_is_what_prometheus_reads() -> None:
    shared = SharedCounters(2)
    for index, definition in enumerate(COUNTERS):
        shared.row(index % 2).add(definition.name, index + 1)
    for seconds in (5e-6, 5e-6, 0.002, 100.0):
        shared.row(1).observe("open_hit_seconds", seconds)
    gauges = {definition.name: index + 0.5 for index, definition in enumerate(GAUGES)}
    text = prometheus_text(shared, gauges, {"landing": 10, 'odd "name"\\': 20}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}

    for index, definition in enumerate(COUNTERS):
        family = families.pop(f"spiderfs_{definition.name}")
        assert (family.type, family.documentation) == ("counter", definition.help)
        assert [(sample.name, sample.value) for sample in family.samples] == [
            (f"spiderfs_{definition.name}_total", index + 1)
        ]
    for index, definition in enumerate(GAUGES):
        family = families.pop(f"spiderfs_{definition.name}")
        assert (family.type, family.documentation) == ("gauge", definition.help)
        assert [sample.value for sample in family.samples] == [index + 0.5]
    section = families.pop("spiderfs_section_bytes")
    assert section.documentation == SECTION_BYTES.help
    assert {sample.labels["section"]: sample.value for sample in section.samples} == {
        "landing": 10,
        'odd "name"\\': 20,
    }
    hits = families.pop("spiderfs_open_hit_seconds")
    assert hits.type == "histogram"
    values = {(sample.name, sample.labels.get("le")): sample.value for sample in hits.samples}
    assert values["spiderfs_open_hit_seconds_count", None] == 4
    assert values["spiderfs_open_hit_seconds_sum", None] == pytest.approx(100.00201)
    buckets = [(float(bound), value) for (_, bound), value in values.items() if bound]
    assert buckets == sorted(buckets), "cumulative, with rising bounds"
    assert dict(buckets)[0.00001] == 2
    assert dict(buckets)[0.0025] == 3
    assert dict(buckets)[float("inf")] == 4
    families.pop("spiderfs_open_miss_seconds")
    assert families == {}


def test_each_peer_has_a_value_of_its_own() -> None:
    values = {definition.name.removeprefix("peer_"): 7 for definition in PEER_COUNTERS} | {"up": 0}
    peers = {"http://n1:8443": values, "http://n2:8443": values | {"up": 1}}
    text = prometheus_text(SharedCounters(1), {}, {}, peers).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for definition in PEER_COUNTERS:
        found = families[f"spiderfs_{definition.name}"]
        assert {sample.labels["peer"]: sample.value for sample in found.samples} == dict.fromkeys(peers, 7)
    up = families[f"spiderfs_{PEER_UP.name}"]
    assert {sample.labels["peer"]: sample.value for sample in up.samples} == {"http://n1:8443": 0, "http://n2:8443": 1}


def test_each_directory_of_the_cache_is_up_or_not() -> None:
    text = prometheus_text(SharedCounters(1), {}, {}, None, {"/nvme0": True, "/nvme1": False}).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    up = families[f"spiderfs_{DIRECTORY_UP.name}"]
    assert {sample.labels["directory"]: sample.value for sample in up.samples} == {"/nvme0": 1, "/nvme1": 0}


# -- the documentation


def defined() -> set[str]:
    return {
        *(f"spiderfs_{found.name}_total" for found in (*COUNTERS, *PEER_COUNTERS)),
        *(f"spiderfs_{found.name}" for found in (*GAUGES, SECTION_BYTES, DIRECTORY_UP, MOUNT_UP, PEER_UP, *HISTOGRAMS)),
    }


def test_the_document_names_every_metric_and_no_other() -> None:
    parts = "|".join(("_bucket", "_sum", "_count"))
    mentioned = {re.sub(f"({parts})$", "", name) for name in re.findall(r"\bspiderfs_\w+\b", DOCUMENT.read_text())}
    assert mentioned - {"spiderfs_"} == defined()
