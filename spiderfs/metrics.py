"""All metrics of spiderfs, and the counters that the processes of a mount share.

Before it forks, the supervisor maps memory that all its processes share. Each process has a row there and adds to its
own row only. So counting needs no lock and costs about 0.1 us, and what a process has counted outlives it. The manager
adds the rows up. The tables below list all metrics; scripts/reference.py writes docs/reference/metrics.md from them.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Definition(NamedTuple):
    name: str
    help: str
    trouble: str = ""  # of a counter that stays 0 while all is well: what a rise means, or what to do


# Counters; each has a cell in the row of every process.
COUNTERS = (
    Definition("lookups", "Lookups by the kernel"),
    Definition("lookups_source", "Lookups that the source answered; many in a later epoch: `ttl` is too short"),
    Definition("lookups_stale", "Lookups answered from expired entries while the source was unreachable"),
    Definition("opens", "Opens of regular files; in an immutable mount READs of a file's first bytes"),
    Definition("opens_hit", "Opens that did not wait for the source; large files always count, see `block_hits`"),
    Definition(
        "page_cache_reads",
        "Planned samples that training runs read from the page cache of an immutable mount; not part of `opens`",
    ),
    Definition("passthrough_opens", "Opens of large files that the kernel reads directly; part of `opens_hit`"),
    Definition("client_opens", "Opens through spiderfs.client; part of `opens`"),
    Definition("redirects", "Opens of a training run that got a substitute"),
    Definition("opens_uncached", "Opens of files that could not be cached: too new, too large, or the disk is full"),
    Definition("opens_young", "Opens of files written in the last seconds, which are not cached yet"),
    Definition("reads", "READ requests that the daemon answered; the page cache answers others"),
    Definition("read_bytes", "Bytes of those READ requests"),
    Definition("block_reads", "Blocks of large files that READ requests needed"),
    Definition("block_hits", "Blocks of large files that READ requests found in the cache"),
    Definition("origin_bytes", "Bytes of file content read from the source, prefetched ones included"),
    Definition("origin_reads", "Reads of file content from the source"),
    Definition("views_made", "Views made; if more than images, the cache is too small for the view"),
    Definition("views_as_they_are", "Files without a view, shown unchanged; the log names one for each reason"),
    Definition(
        "view_makers_lost",
        "Files for which two view makers died or timed out",
        "The machine lacks memory or is overloaded; see the log.",
    ),
    Definition("source_requests", "Calls to the source of all kinds"),
    Definition("source_retries", "Repeated calls to the source after a transient error"),
    Definition(
        "source_timeouts", "Calls to the source that timed out", "Each kept its callers waiting for `source.timeout_s`."
    ),
    Definition(
        "source_errors",
        "Calls to the source whose last attempt failed",
        "Each was an error for a reader, unless a stale entry could answer.",
    ),
    Definition("readahead_blocks", "Blocks of large files fetched before a READ request needed them"),
    Definition("stall_microseconds", "Time that opens and reads waited for the source"),
    Definition(
        "checksum_failures",
        "Records with a wrong checksum, fetched again",
        "The disk of the cache damages data; readers got correct bytes from the source.",
    ),
    Definition(
        "store_failures",
        "Failed operations on the store; readers got bytes from the source",
        "See the log; most often the disk is full.",
    ),
    Definition("stale_handles", "Requests for a version of a file that is gone (ESTALE); a shorter `ttl` helps"),
    Definition(
        "events_dropped",
        "Events dropped because the manager was too slow",
        "The manager lacks processor time, and sees only part of the accesses.",
    ),
    Definition("events_folded", "Events that the manager has applied"),
    Definition("admitted", "Records that the engine admitted from landing into a section"),
    Definition("evicted", "Records that the engine evicted"),
    Definition("landing_lost", "Records that left landing before the manager could keep them"),
    Definition("warmed", "Files that `warm` fetched"),
    Definition("planned_opens", "Opens by trainers that follow a published plan"),
    Definition(
        "planned_late", "Those of `planned_opens` that waited; above 1%, the source is too slow or the cache too small"
    ),
    Definition("pushed", "Planned files pushed into the page cache of an immutable mount"),
    Definition("prefetched", "Files prefetched for a plan"),
    Definition("packages_written", "Packages of small files written to the source (`packages=source`)"),
    Definition("package_bytes_written", "Bytes of those packages"),
    Definition("packages_loaded", "Packages read from the source; part of `origin_reads` and `origin_bytes`"),
    Definition("packaged_samples", "Files that came into the cache with packages"),
    Definition("packages_removed", "Packages removed because they were damaged or mostly stale"),
    Definition("packages_ignored", "Packages of other mounts, or writable by other users, that were not read"),
    Definition("hook_batches", "Batches received from trainers; constant during training: no hook is connected"),
    Definition("hook_rows_left_out", "Samples not scored because the manager was too slow"),
    Definition("hook_forwards_unmatched", "Forward passes whose samples the hook could not identify"),
    Definition(
        "hook_malformed",
        "Messages of trainers that were refused",
        "The client has a bug; the error that it received names it.",
    ),
    Definition(
        "hook_refused",
        "Hook connections refused: another user, or too many",
        "Run the training as the user of the daemon.",
    ),
    Definition("partials_kept", "Partly augmented samples that loaders put into the cache"),
    Definition("partials_refused", "Partly augmented samples that found no room in the cache"),
    Definition("cluster_rows_sent", "Samples sent to the node with rank 0 to be scored"),
    Definition("cluster_rows_received", "Samples received from other nodes to be scored"),
    Definition(
        "cluster_rows_lost",
        "Samples that the server of `cluster` did not accept",
        "The server is down or full, and scores get stale; see the log.",
    ),
    Definition("cluster_scores_received", "Scores received from the node with rank 0"),
    Definition("cluster_plans_received", "Plans received from jobs on other nodes"),
    Definition(
        "cluster_plans_lost",
        "Plans that the server of `cluster` did not accept, or delivered in part",
        "The server is down or slow; some nodes evict what a job reads next.",
    ),
    Definition(
        "internal_errors", "Unexpected exceptions in request handlers", "This is a bug: please report it with the log."
    ),
    Definition("answers", "Answered requests of the kernel, errors included"),
    Definition("queue_races", "Wake-ups of a worker for a request that another worker had taken"),
    Definition("process_starts", "Workers and managers that have started"),
    Definition("worker_restarts", "Workers restarted after an unexpected end", "See the log."),
    Definition(
        "manager_restarts", "Managers restarted after an unexpected end", "See the log; reads continued meanwhile."
    ),
    Definition("resends", "Requests to the kernel to resend unanswered requests"),
    Definition(
        "deadly_requests",
        "Requests answered with EIO because each worker died at them",
        "This is a bug, or a lack of memory: please report the inode in the log.",
    ),
    Definition(
        "store_rebuilds",
        "Rebuilds of a damaged store",
        "The cache began empty, after a power loss or because of its disk.",
    ),
)

# Counters that stay 0 while all is well.
TROUBLES = frozenset(definition.name for definition in COUNTERS if definition.trouble)

# Upper bounds of the latency histograms, in microseconds.
BUCKETS_US = (10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 1_000_000, 10_000_000)

HISTOGRAMS = (
    Definition("open_hit_seconds", "Time in the daemon for an open served from the cache"),
    Definition("open_miss_seconds", "Time in the daemon for an open that waited for the source or a free slot"),
)

# The manager computes a gauge when it is read.
GAUGES = (
    Definition("capacity_bytes", "Bytes that the cache may hold; a share grows while the source is measured"),
    Definition("used_bytes", "Bytes of file content in the cache, landing included"),
    Definition("entries", "Records in the cache, landing included"),
    Definition("disk_bytes", "Bytes of the store's files: about 11 % above `used_bytes` for files of 100 kB"),
    Definition("known_files", "Names in the catalogue"),
    Definition("hit_ratio", "(opens_hit + page_cache_reads) / (opens + page_cache_reads) since the mount"),
    Definition("origin_bytes_per_open", "origin_bytes / (opens + page_cache_reads)"),
    Definition("source_reachable", "1 while the source answers, else 0"),
    Definition("cluster_up", "0 while the server of `cluster` fails, else 1"),
    Definition("memory_limit_bytes", "The option `memory_limit`; 0 without a limit"),
    Definition("memory_in_flight_bytes", "Bytes in flight from the source, in all processes"),
    Definition("memory_pushed_bytes", "Bytes of pushed files in the page cache that were not read yet"),
    Definition("memory_samples_bytes", "Memory of the manager for names, plans and scores of samples"),
    Definition("workers", "Worker processes"),
    Definition("uptime_seconds", "Seconds since the mount"),
)

# What the sections hold, one value each; which sections there are depends on the policy.
SECTION_BYTES = Definition("section_bytes", "Bytes of file content by section of the cache")

# Of each directory of the cache.
DIRECTORY_UP = Definition("cache_dir_up", "0 if a directory of the cache is left out, else 1")
# Of what serves the metrics of several mounts.
MOUNT_UP = Definition("up", "1 while the mount answers, else 0")
# Reads from other nodes' caches, one value for each `peer`; `origin_bytes` has none of them.
PEER_COUNTERS = (
    Definition("peer_hits", "Reads of file content that another node answered"),
    Definition("peer_bytes", "Bytes of those reads"),
    Definition("peer_absent", "Requests for files that another node does not have under this name and version"),
    Definition("peer_timeouts", "Requests to another node that timed out or failed; the source was read"),
)
PEER_UP = Definition("peer_up", "1 while another node answers, else 0")

_CELL = {definition.name: index for index, definition in enumerate(COUNTERS)}
# A histogram has a cell for each bucket, one for all times above the last bound, and one for the sum in microseconds.
_HISTOGRAM_CELLS = len(BUCKETS_US) + 2
_HISTOGRAM_AT = {
    definition.name: len(COUNTERS) + index * _HISTOGRAM_CELLS for index, definition in enumerate(HISTOGRAMS)
}
# The last cells are no counts: 1 while the process finds the source unreachable, and the bytes that it has in flight.
_UNREACHABLE_CELL = len(COUNTERS) + len(HISTOGRAMS) * _HISTOGRAM_CELLS
_IN_FLIGHT_CELL = _UNREACHABLE_CELL + 1
_ROW_CELLS = _IN_FLIGHT_CELL + 1
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

    def set_in_flight(self, held_bytes: int) -> None:
        self._row[_IN_FLIGHT_CELL] = held_bytes

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

    def in_flight_bytes(self) -> int:
        return self.total(_IN_FLIGHT_CELL)

    def histogram(self, name: str) -> tuple[list[int], float]:
        """The count in each bucket, and the sum in seconds; there is one bucket more than in BUCKETS_US."""
        first = _HISTOGRAM_AT[name]
        counts = [self.total(first + index) for index in range(len(BUCKETS_US) + 1)]
        return counts, self.total(first + _HISTOGRAM_CELLS - 1) / 1e6


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def prometheus_text(
    shared: SharedCounters,
    gauges: Mapping[str, float],
    sections: Mapping[str, int],
    peers: Mapping[str, Mapping[str, int]] | None = None,
    directories: Mapping[str, bool] | None = None,
) -> bytes:
    """All metrics in Prometheus' text format.

    `peers` has the values of each other node by its URL; `directories`, whether each of the cache is in use.
    """
    totals = shared.totals()
    families: list[Metric] = [
        *(CounterMetricFamily(f"spiderfs_{of.name}", of.help, value=totals[of.name]) for of in COUNTERS),
        *(GaugeMetricFamily(f"spiderfs_{of.name}", of.help, value=gauges.get(of.name, 0)) for of in GAUGES),
    ]
    section = GaugeMetricFamily(f"spiderfs_{SECTION_BYTES.name}", SECTION_BYTES.help, labels=["section"])
    for name, size in sections.items():
        section.add_metric([name], size)
    families.append(section)
    for definition in (*PEER_COUNTERS, PEER_UP) if peers else ():
        kind = GaugeMetricFamily if definition is PEER_UP else CounterMetricFamily
        family = kind(f"spiderfs_{definition.name}", definition.help, labels=["peer"])
        for url, values in (peers or {}).items():
            family.add_metric([url], values[definition.name.removeprefix("peer_")])
        families.append(family)
    if directories:
        family = GaugeMetricFamily(f"spiderfs_{DIRECTORY_UP.name}", DIRECTORY_UP.help, labels=["directory"])
        for path, up in directories.items():
            family.add_metric([path], up)
        families.append(family)
    bounds = (*(str(us / 1e6) for us in BUCKETS_US), "+Inf")
    for definition in HISTOGRAMS:
        counts, total = shared.histogram(definition.name)
        buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
        families.append(
            HistogramMetricFamily(f"spiderfs_{definition.name}", definition.help, buckets=buckets, sum_value=total)
        )
    return generate_latest(_Collected(families))
