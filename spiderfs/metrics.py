"""Every metric of spiderfs, and the counters that all processes of a mount share.

The supervisor maps one anonymous shared page range before it forks; each process owns a row of it and adds to its own
row only, so counting needs no lock, costs about 0.1 us and survives the death of the process. The manager sums the
rows. The table below is the whole list: docs/METRICS.md is checked against it.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Definition(NamedTuple):
    name: str
    help: str


# Counters, one cell each in every process's row.
COUNTERS = (
    Definition("lookups", "Names looked up by the kernel"),
    Definition("lookups_source", "Look-ups that had to ask the source"),
    Definition("lookups_stale", "Look-ups answered from expired knowledge because the source was unreachable"),
    Definition("opens", "Opens of regular files"),
    Definition("opens_hit", "Opens served without waiting for the source"),
    Definition("passthrough_opens", "Opens of large files that the kernel reads from the cache by itself"),
    Definition("client_opens", "Opens that spiderfs.client served without the mount"),
    Definition("redirects", "Opens for which a trainer was given a cached neighbour of the same class"),
    Definition("opens_uncached", "Opens whose bytes could not be put into the cache"),
    Definition("reads", "READ requests answered (the kernel's page cache answers the others)"),
    Definition("read_bytes", "Bytes handed to the kernel by READ"),
    Definition("block_reads", "Blocks of large files needed by READ"),
    Definition("block_hits", "Blocks of large files that were in the cache"),
    Definition("origin_bytes", "Bytes of file content read from the source, prefetches and refills included"),
    Definition("origin_reads", "Reads of file content from the source"),
    Definition("source_requests", "Calls to the source, of every kind"),
    Definition("source_retries", "Calls repeated after a transient error"),
    Definition("source_timeouts", "Calls that ran into the time limit"),
    Definition("source_errors", "Calls that failed after their last attempt"),
    Definition("readahead_blocks", "Blocks of large files fetched ahead of their READ"),
    Definition("stall_microseconds", "Time that opens and reads spent waiting for the source"),
    Definition("checksum_failures", "Cached records that failed their checksum and were fetched again"),
    Definition("store_failures", "Cache operations that failed; the source answered instead"),
    Definition("stale_handles", "Requests for a version of a file that is no longer to be had (ESTALE)"),
    Definition("events_dropped", "Access events dropped because the manager was behind"),
    Definition("events_folded", "Access events the manager has acted on"),
    Definition("admitted", "Records moved from landing into a section"),
    Definition("evicted", "Records dropped by the policy"),
    Definition("landing_lost", "Records that left landing before the manager could keep them"),
    Definition("warmed", "Files fetched on the user's request"),
    Definition("planned_opens", "Opens by trainers that follow a published plan, of samples of its list"),
    Definition("planned_late", "Those of planned_opens that waited for the source all the same"),
    Definition("prefetched", "Files fetched ahead of their use because a plan names them"),
    Definition("packages_written", "Packages of small files written to the source"),
    Definition("package_bytes_written", "Bytes of those packages"),
    Definition("packages_loaded", "Packages read from the source"),
    Definition("packaged_samples", "Files that came into the cache with packages"),
    Definition("packages_removed", "Packages removed because they were damaged, or mostly of no use any more"),
    Definition("packages_ignored", "Packages at the source that this mount has not made, or others may write to"),
    Definition("hook_batches", "Batches taken from trainers"),
    Definition("hook_batches_dropped", "Batches of trainers dropped because the manager was behind"),
    Definition(
        "hook_rows_left_out", "Samples of trainers' batches that were not scored because the manager was behind"
    ),
    Definition("hook_forwards_unmatched", "Forward passes of which trainers could not say the samples"),
    Definition("hook_malformed", "Messages of trainers that were refused; each was answered by an error"),
    Definition("hook_refused", "Connections of trainers refused: a foreign user, or too many"),
    Definition("hook_throttled", "Messages of trainers that had to wait because they came too fast"),
    Definition("internal_errors", "Unexpected exceptions in request handlers; each is logged"),
    Definition("answers", "Requests of the kernel that were answered, with an error or without; counted now and then"),
    Definition("queue_races", "Wake-ups for a request that another worker had taken"),
    Definition("process_starts", "Workers and managers that were ready to work"),
    Definition("worker_restarts", "Workers started again after an unexpected end"),
    Definition("manager_restarts", "Managers started again after an unexpected end"),
    Definition("resends", "Times the kernel was asked to hand out unanswered requests again"),
    Definition("store_rebuilds", "Times the store was found damaged and rebuilt"),
)

# Upper bounds of the latency histograms, in microseconds.
BUCKETS_US = (10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 1_000_000, 10_000_000)

HISTOGRAMS = (
    Definition("open_hit_seconds", "Time in the daemon for an open served from the cache"),
    Definition("open_miss_seconds", "Time in the daemon for an open that fetched from the source"),
)

# Computed by the manager when somebody asks.
GAUGES = (
    Definition("capacity_bytes", "The cache's byte budget"),
    Definition("used_bytes", "Payload bytes in the cache, landing included"),
    Definition("entries", "Records in the cache, landing included"),
    Definition("disk_bytes", "Bytes of the store's files; small files take whole pages there"),
    Definition("known_files", "Names in the catalogue"),
    Definition("hit_ratio", "opens_hit / opens"),
    Definition("origin_bytes_per_open", "origin_bytes / opens: what one served sample cost the source"),
    Definition("source_reachable", "1 while the source answers"),
    Definition("workers", "Worker processes"),
    Definition("uptime_seconds", "Seconds since the mount"),
)

_CELL = {definition.name: index for index, definition in enumerate(COUNTERS)}
# Per histogram: one cell a bucket, one for everything above, one for the sum in microseconds.
_HISTOGRAM_CELLS = len(BUCKETS_US) + 2
_HISTOGRAM_AT = {
    definition.name: len(COUNTERS) + index * _HISTOGRAM_CELLS for index, definition in enumerate(HISTOGRAMS)
}
# The last cell is not counted up but set: 1 while the process finds the source unreachable.
_UNREACHABLE_CELL = len(COUNTERS) + len(HISTOGRAMS) * _HISTOGRAM_CELLS
_ROW_CELLS = _UNREACHABLE_CELL + 1
_CELL_BYTES = 8


class Counters:
    """One process's row: `add` and `observe` are safe from any thread that does not share the row's event loop.

    Python adds in three steps, so two threads of one process could lose a count; all counting is done on the event
    loop's thread.
    """

    def __init__(self, row: memoryview) -> None:
        self._row = row

    def add(self, name: str, amount: int = 1) -> None:
        self._row[_CELL[name]] += amount

    def value(self, name: str) -> int:
        """Of this row: also what processes counted whose place this one has taken."""
        return int(self._row[_CELL[name]])

    def set_source_reachable(self, reachable: bool) -> None:
        self._row[_UNREACHABLE_CELL] = not reachable

    def observe(self, name: str, seconds: float) -> None:
        microseconds = int(seconds * 1e6)
        first = _HISTOGRAM_AT[name]
        self._row[first + bisect_left(BUCKETS_US, microseconds)] += 1
        self._row[first + _HISTOGRAM_CELLS - 1] += microseconds


class SharedCounters:
    """The rows of all processes of one mount; create before the fork."""

    def __init__(self, rows: int) -> None:
        self._map = mmap.mmap(-1, rows * _ROW_CELLS * _CELL_BYTES)
        self._cells = memoryview(self._map).cast("Q")
        self._rows = rows

    def row(self, index: int) -> Counters:
        return Counters(self._cells[index * _ROW_CELLS : (index + 1) * _ROW_CELLS])

    def total(self, cell: int) -> int:
        return sum(self._cells[row * _ROW_CELLS + cell] for row in range(self._rows))

    def totals(self) -> dict[str, int]:
        """Sum of every counter over all processes."""
        return {name: self.total(cell) for name, cell in _CELL.items()}

    def source_reachable(self) -> bool:
        """Whether no process finds the source unreachable."""
        return self.total(_UNREACHABLE_CELL) == 0

    def histogram(self, name: str) -> tuple[list[int], float]:
        """Count per bucket (one more than BUCKETS_US) and the sum in seconds."""
        first = _HISTOGRAM_AT[name]
        counts = [self.total(first + index) for index in range(len(BUCKETS_US) + 1)]
        return counts, self.total(first + _HISTOGRAM_CELLS - 1) / 1e6


class _Snapshot(Collector):
    def __init__(self, shared: SharedCounters, gauges: Mapping[str, float], sections: Mapping[str, int]) -> None:
        self._shared = shared
        self._gauges = gauges
        self._sections = sections

    def collect(self) -> list[Metric]:
        families: list[Metric] = []
        totals = self._shared.totals()
        for definition in COUNTERS:
            families.append(
                CounterMetricFamily(f"spiderfs_{definition.name}", definition.help, value=totals[definition.name])
            )
        for definition in GAUGES:
            families.append(
                GaugeMetricFamily(
                    f"spiderfs_{definition.name}", definition.help, value=self._gauges.get(definition.name, 0)
                )
            )
        section = GaugeMetricFamily("spiderfs_section_bytes", "Payload bytes per section", labels=["section"])
        for name, size in self._sections.items():
            section.add_metric([name], size)
        families.append(section)
        for definition in HISTOGRAMS:
            counts, total = self._shared.histogram(definition.name)
            cumulative, buckets = 0, []
            for bound, count in zip((*(str(us / 1e6) for us in BUCKETS_US), "+Inf"), counts, strict=True):
                cumulative += count
                buckets.append((bound, float(cumulative)))
            families.append(
                HistogramMetricFamily(f"spiderfs_{definition.name}", definition.help, buckets=buckets, sum_value=total)
            )
        return families


def prometheus_text(shared: SharedCounters, gauges: Mapping[str, float], sections: Mapping[str, int]) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(shared, gauges, sections))
    return generate_latest(registry)
