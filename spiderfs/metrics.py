"""All metrics of spiderfs, and the counters that the processes of a mount share.

Before it forks, the supervisor maps memory that all its processes share. Each process has a row there and adds to its
own row only. So counting needs no lock and costs about 0.1 us, and what a process has counted outlives it. The manager
adds the rows up. The tables below list all metrics; a test compares docs/METRICS.md with them.
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


# Counters; each has a cell in the row of every process.
COUNTERS = (
    Definition("lookups", "Names looked up by the kernel"),
    Definition("lookups_source", "Look-ups that had to ask the source"),
    Definition("lookups_stale", "Look-ups answered from expired entries because the source was unreachable"),
    Definition("opens", "Opens of regular files"),
    Definition("opens_hit", "Opens served without waiting for the source"),
    Definition("page_cache_reads", "Samples that trainings read from the page cache of an immutable mount, unseen"),
    Definition("passthrough_opens", "Opens of large files that the kernel reads from the cache by itself"),
    Definition("client_opens", "Opens that spiderfs.client served without the mount"),
    Definition("redirects", "Opens for which a trainer got a stand-in"),
    Definition("opens_uncached", "Opens whose bytes could not be cached"),
    Definition("reads", "READ requests that the daemon answered; the kernel answers others from its page cache"),
    Definition("read_bytes", "Bytes with which the daemon answered READ requests"),
    Definition("block_reads", "Blocks of large files that READ requests needed"),
    Definition("block_hits", "Blocks of large files that READ requests found in the cache"),
    Definition("origin_bytes", "Bytes of file content read from the source, those fetched ahead or again included"),
    Definition("origin_reads", "Reads of file content from the source"),
    Definition("views_made", "Views made, those made again after an eviction included"),
    Definition("views_as_they_are", "Files that were shown as they are, because there is no view of them"),
    Definition("view_makers_lost", "Files for which two makers of views died or did not answer in time"),
    Definition("source_requests", "Calls to the source, of all kinds"),
    Definition("source_retries", "Calls to the source that were repeated after an error that may pass"),
    Definition("source_timeouts", "Calls to the source that exceeded the time limit"),
    Definition("source_errors", "Calls to the source that failed at their last attempt"),
    Definition("readahead_blocks", "Blocks of large files fetched before a READ request needed them"),
    Definition("stall_microseconds", "Time that opens and reads spent waiting for the source"),
    Definition("checksum_failures", "Records that did not match their checksum and were fetched again"),
    Definition("store_failures", "Operations on the store that failed, so that the source was asked instead"),
    Definition("stale_handles", "Requests for a version of a file that neither cache nor source has any more (ESTALE)"),
    Definition("events_dropped", "Events dropped because the manager was too slow to take them"),
    Definition("events_folded", "Events that the manager has acted on"),
    Definition("admitted", "Records that the engine admitted from landing into a section"),
    Definition("evicted", "Records that the engine evicted"),
    Definition("landing_lost", "Records that left landing before the manager could keep them"),
    Definition("warmed", "Files fetched on the user's request"),
    Definition("planned_opens", "Opens by trainers that follow a published plan, of samples of its list"),
    Definition("planned_late", "Those of planned_opens that had to wait for the source"),
    Definition("pushed", "Files that the kernel was made to read because a plan names them (-o immutable)"),
    Definition("prefetched", "Files fetched ahead of their use because a plan names them"),
    Definition("packages_written", "Packages of small files written to the source"),
    Definition("package_bytes_written", "Bytes of those packages"),
    Definition("packages_loaded", "Packages read from the source"),
    Definition("packaged_samples", "Files that came into the cache with packages"),
    Definition("packages_removed", "Packages removed because they were damaged or held mostly superseded files"),
    Definition(
        "packages_ignored",
        "Packages at the source that another mount made, or that others may write to; they are not read",
    ),
    Definition("hook_batches", "Batches taken from trainers"),
    Definition(
        "hook_rows_left_out", "Samples of trainers' batches that were not scored because the manager was too slow"
    ),
    Definition("hook_forwards_unmatched", "Forward passes whose samples the hook could not name"),
    Definition("hook_malformed", "Messages of trainers that were refused, each with an error as answer"),
    Definition("hook_refused", "Connections refused because another user made them or there were too many"),
    Definition("partials_kept", "Partly augmented samples that loaders put into the cache"),
    Definition("partials_refused", "Partly augmented samples that found no room in the cache"),
    Definition("hook_throttled", "Messages of trainers that had to wait because too many came at once"),
    Definition("internal_errors", "Exceptions in request handlers that nobody expected; each is logged"),
    Definition(
        "answers",
        "Requests of the kernel that were answered, also with an error; the count is updated now and then",
    ),
    Definition("queue_races", "Times a worker woke up for a request that another worker had already taken"),
    Definition("process_starts", "Workers and managers that have started and were ready to work"),
    Definition("worker_restarts", "Workers that were started again after they had ended unexpectedly"),
    Definition("manager_restarts", "Managers that were started again after they had ended unexpectedly"),
    Definition("resends", "Times the kernel was asked to send its unanswered requests again"),
    Definition("deadly_requests", "Requests answered with EIO because worker after worker had died at them"),
    Definition("store_rebuilds", "Times the store was found damaged and rebuilt"),
)

# Upper bounds of the latency histograms, in microseconds.
BUCKETS_US = (10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 1_000_000, 10_000_000)

HISTOGRAMS = (
    Definition("open_hit_seconds", "Time in the daemon for an open served from the cache"),
    Definition("open_miss_seconds", "Time in the daemon for an open that fetched from the source"),
)

# The manager computes a gauge when somebody reads it.
GAUGES = (
    Definition("capacity_bytes", "How many bytes the cache may hold"),
    Definition("used_bytes", "Bytes of file content in the cache, landing included"),
    Definition("entries", "Records in the cache, landing included"),
    Definition("disk_bytes", "Bytes of the store's files, in which a small sample takes whole pages"),
    Definition("known_files", "Names in the catalogue"),
    Definition(
        "hit_ratio", "Share of the opens, those that were not seen among them, that did not wait for the source"
    ),
    Definition("origin_bytes_per_open", "origin_bytes for each open, those that were not seen among them"),
    Definition("source_reachable", "1 while the source answers, else 0"),
    Definition("workers", "Worker processes"),
    Definition("uptime_seconds", "Seconds since the mount"),
)

_CELL = {definition.name: index for index, definition in enumerate(COUNTERS)}
# A histogram has a cell for each bucket, one for all times above the last bound, and one for the sum in microseconds.
_HISTOGRAM_CELLS = len(BUCKETS_US) + 2
_HISTOGRAM_AT = {
    definition.name: len(COUNTERS) + index * _HISTOGRAM_CELLS for index, definition in enumerate(HISTOGRAMS)
}
# The last cell is a flag, not a count: 1 while the process finds the source unreachable.
_UNREACHABLE_CELL = len(COUNTERS) + len(HISTOGRAMS) * _HISTOGRAM_CELLS
_ROW_CELLS = _UNREACHABLE_CELL + 1
_CELL_BYTES = 8


class Counters:
    """The row of one process; only the thread of its event loop may call `add` and `observe`.

    Python adds in three steps, so two threads that count at once could lose a count.
    """

    def __init__(self, row: memoryview) -> None:
        self._row = row

    def add(self, name: str, amount: int = 1) -> None:
        self._row[_CELL[name]] += amount

    def value(self, name: str) -> int:
        """The count in this row, with what earlier processes counted that had the row before."""
        return int(self._row[_CELL[name]])

    def set_source_reachable(self, reachable: bool) -> None:
        self._row[_UNREACHABLE_CELL] = not reachable

    def observe(self, name: str, seconds: float) -> None:
        microseconds = int(seconds * 1e6)
        first = _HISTOGRAM_AT[name]
        self._row[first + bisect_left(BUCKETS_US, microseconds)] += 1
        self._row[first + _HISTOGRAM_CELLS - 1] += microseconds


class SharedCounters:
    """The rows of all processes of one mount; it must be made before these processes are forked."""

    def __init__(self, rows: int) -> None:
        self._map = mmap.mmap(-1, rows * _ROW_CELLS * _CELL_BYTES)
        self._cells = memoryview(self._map).cast("Q")
        self._rows = rows

    def row(self, index: int) -> Counters:
        return Counters(self._cells[index * _ROW_CELLS : (index + 1) * _ROW_CELLS])

    def total(self, cell: int) -> int:
        return sum(self._cells[row * _ROW_CELLS + cell] for row in range(self._rows))

    def totals(self) -> dict[str, int]:
        """Each counter's sum over all processes."""
        return {name: self.total(cell) for name, cell in _CELL.items()}

    def source_reachable(self) -> bool:
        """Whether no process finds the source unreachable."""
        return self.total(_UNREACHABLE_CELL) == 0

    def histogram(self, name: str) -> tuple[list[int], float]:
        """The count in each bucket, of which there is one more than in BUCKETS_US, and the sum in seconds."""
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
        section = GaugeMetricFamily("spiderfs_section_bytes", "Bytes of file content by section", labels=["section"])
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
