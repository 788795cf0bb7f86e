"""All metrics of spiderfs, and the counters that the processes of a mount share.

Before it forks, the supervisor maps memory that all its processes share. Each process has a row there and adds to its
own row only. So counting needs no lock and costs about 0.1 us, and what a process has counted outlives it. The manager
adds the rows up. The tables below list all metrics; scripts/reference.py writes docs/reference/metrics.md from them.

The module is long because of these tables: each metric is said in three lines.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Definition(NamedTuple):
    name: str
    help: str
    use: str  # what its value says, or what to do about it; for docs/reference/metrics.md


# Counters; each has a cell in the row of every process.
COUNTERS = (
    Definition(
        "lookups",
        "Names looked up by the kernel",
        "With `lookups_source`: the share of names that the catalogue answers.",
    ),
    Definition(
        "lookups_source",
        "Look-ups that had to ask the source",
        "High in a second epoch: `ttl` is shorter than an epoch, or the files change.",
    ),
    Definition(
        "lookups_stale",
        "Look-ups answered from expired entries because the source was unreachable",
        "Above 0 only while the source is away: names are shown as they were known last.",
    ),
    Definition(
        "opens",
        "Opens of regular files",
        "The denominator of most ratios. In an immutable mount: READs of a file's first bytes; what the page "
        "cache answers is not seen.",
    ),
    Definition(
        "opens_hit",
        "Opens served without waiting for the source",
        "`opens_hit / opens` is the demand hit ratio, but in an immutable mount see `page_cache_reads`. Files "
        "above `sample_max_bytes` always count as hits: see `block_hits`.",
    ),
    Definition(
        "page_cache_reads",
        "Samples that trainings read from the page cache of an immutable mount, unseen",
        "Not part of `opens`. Known by the plan: what a training's loop has taken and no worker was asked for, "
        "samples that it keeps in its own memory included. Stands still without a plan.",
    ),
    Definition(
        "passthrough_opens",
        "Opens of large files that the kernel reads from the cache by itself",
        "Part of `opens` and `opens_hit`. What is read after them is in neither `reads` nor `block_reads`.",
    ),
    Definition(
        "client_opens", "Opens that spiderfs.client served without the mount", "Part of `opens` and `opens_hit`."
    ),
    Definition(
        "redirects",
        "Opens for which a trainer got a stand-in",
        "`redirects / opens` is the share of reads for which a stand-in spared the source.",
    ),
    Definition(
        "opens_uncached",
        "Opens whose bytes could not be cached",
        "Beyond `opens_young`: the disk is full, or files are larger than half the capacity.",
    ),
    Definition(
        "opens_young",
        "Opens of files that were written within the last seconds, and are not cached yet",
        "They may still change. A while later they are cached when they are opened.",
    ),
    Definition(
        "reads",
        "READ requests that the daemon answered; the kernel answers others from its page cache",
        "Far fewer than the files read is good.",
    ),
    Definition("read_bytes", "Bytes with which the daemon answered READ requests", "Without what the page cache gave."),
    Definition(
        "block_reads",
        "Blocks of large files that READ requests needed",
        "With `block_hits`: the hit ratio of large files.",
    ),
    Definition(
        "block_hits",
        "Blocks of large files that READ requests found in the cache",
        "Blocks that read-ahead brought in time count.",
    ),
    Definition(
        "origin_bytes",
        "Bytes of file content read from the source, those fetched ahead or again included",
        "The honest cost. Divided by `opens` it is the origin bytes per served sample.",
    ),
    Definition(
        "origin_reads",
        "Reads of file content from the source",
        "`origin_bytes / origin_reads` is the mean size of a read from the source.",
    ),
    Definition(
        "views_made",
        "Views made, those made again after an eviction included",
        "More than the images of the source: the cache is too small for the view.",
    ),
    Definition(
        "views_as_they_are",
        "Files that were shown as they are, because there is no view of them",
        "The log names the first file of each reason.",
    ),
    Definition(
        "view_makers_lost",
        "Files for which two makers of views died or did not answer in time",
        "Alert on growth: the machine is short of memory, or overloaded; the log names the first file.",
    ),
    Definition(
        "source_requests", "Calls to the source, of all kinds", "The load on the server, stats and scans included."
    ),
    Definition(
        "source_retries",
        "Calls to the source that were repeated after an error that may pass",
        "A few are normal on a busy network; a steady rate says that the source is ill.",
    ),
    Definition(
        "source_timeouts",
        "Calls to the source that exceeded the time limit",
        "Each one kept its callers waiting for `source.timeout_s`.",
    ),
    Definition(
        "source_errors",
        "Calls to the source that failed at their last attempt",
        "Each one is an error that a reader saw, unless older knowledge could answer.",
    ),
    Definition(
        "readahead_blocks",
        "Blocks of large files fetched before a READ request needed them",
        "Much more than `block_reads`: readers jump, and `read_ahead` is too deep for them.",
    ),
    Definition(
        "stall_microseconds",
        "Time that opens and reads spent waiting for the source",
        "Its rate per second, divided by a million, is how many readers wait on average.",
    ),
    Definition(
        "checksum_failures",
        "Records that did not match their checksum and were fetched again",
        "More than 0: the disk of the cache damages data. Readers got the right bytes from the source.",
    ),
    Definition(
        "store_failures",
        "Operations on the store that failed, so that the source was asked instead",
        "More than 0: the log says why, mostly a full disk.",
    ),
    Definition(
        "stale_handles",
        "Requests for a version of a file that neither cache nor source has any more (ESTALE)",
        "Files change at the source while they are read; a shorter `ttl` makes it rarer.",
    ),
    Definition(
        "events_dropped",
        "Events dropped because the manager was too slow to take them",
        "Rising: the manager has too little processor time, and decides on a part of the accesses.",
    ),
    Definition(
        "events_folded",
        "Events that the manager has acted on",
        "Stands still while `opens` rises: there is no manager, see `manager_restarts`.",
    ),
    Definition(
        "admitted",
        "Records that the engine admitted from landing into a section",
        "With `evicted`: how much the cache turns over.",
    ),
    Definition(
        "evicted",
        "Records that the engine evicted",
        "Each one may have to be fetched again. 0 with the policy `minio` unless the capacity shrinks.",
    ),
    Definition(
        "landing_lost",
        "Records that left landing before the manager could keep them",
        "Rising: files come faster than the manager decides, or landing is small for them.",
    ),
    Definition("warmed", "Files fetched on the user's request", "The progress of a request is in `.spiderfs/warm`."),
    Definition(
        "planned_opens",
        "Opens by trainers that follow a published plan, of samples of its list",
        "Stands still while a training runs: no plan has come, or it is not followed, see `.spiderfs/plan`.",
    ),
    Definition(
        "planned_late",
        "Those of planned_opens that had to wait for the source",
        "More than 1 %: the source gives less than the training takes, or the cache is too small to look ahead.",
    ),
    Definition(
        "pushed",
        "Files that the kernel was made to read because a plan names them (-o immutable)",
        "Those that were not cached count in `prefetched` too. Stands still while a plan is followed: the kernel "
        "has the files already, or the source gives nothing.",
    ),
    Definition(
        "prefetched",
        "Files fetched ahead of their use because a plan names them",
        "With `planned_late`: how many waits were spared.",
    ),
    Definition(
        "packages_written",
        "Packages of small files written to the source",
        "Only with `packages=source`. Nothing is read for them: they are made of what readers were given.",
    ),
    Definition("package_bytes_written", "Bytes of those packages", "What the source has to store, and was sent."),
    Definition(
        "packages_loaded",
        "Packages read from the source",
        "Each is one of `origin_reads`, and all of its bytes are in `origin_bytes`, those of no use too.",
    ),
    Definition(
        "packaged_samples",
        "Files that came into the cache with packages",
        "`packaged_samples / packages_loaded` is how many reads one package has saved.",
    ),
    Definition(
        "packages_removed",
        "Packages removed because they were damaged or held mostly superseded files",
        "Some with each epoch are normal: the policy's list changes, or the files have changed.",
    ),
    Definition(
        "packages_ignored",
        "Packages at the source that another mount made, or that others may write to; they are not read",
        "Harmless where several mounts share a source, or the cache directory was deleted since. Else somebody "
        "tries to have readers given forged bytes.",
    ),
    Definition(
        "hook_batches",
        "Batches taken from trainers",
        "Stands still while a training runs: its hook has no connection, see `stats`.",
    ),
    Definition(
        "hook_rows_left_out",
        "Samples of trainers' batches that were not scored because the manager was too slow",
        "Rising: scoring takes longer than training; samples that were scored the longest ago go first.",
    ),
    Definition(
        "hook_forwards_unmatched",
        "Forward passes whose samples the hook could not name",
        "A few are normal where a training also uses samples that no attached loader gave. As many as there are "
        "batches: nothing is learned, and a warning in the training says why.",
    ),
    Definition(
        "hook_malformed",
        "Messages of trainers that were refused, each with an error as answer",
        "More than 0: the client has a bug, and the error it was sent says which.",
    ),
    Definition(
        "hook_refused",
        "Connections refused because another user made them or there were too many",
        "More than 0: the training runs as another user than the daemon.",
    ),
    Definition(
        "partials_kept",
        "Partly augmented samples that loaders put into the cache",
        "With `refurbish(reuse=2)` half of the samples in each epoch after the first.",
    ),
    Definition(
        "partials_refused",
        "Partly augmented samples that found no room in the cache",
        "More than a few: partial samples vary in size, or the capacity became less; these are made anew at each use.",
    ),
    Definition(
        "hook_throttled",
        "Messages of trainers that had to wait because too many came at once",
        "A few are harmless; a steady rate says that one client floods the daemon.",
    ),
    Definition(
        "cluster_rows_sent",
        "Samples of trainers' batches that were sent to the other nodes of a training, to be scored there",
        "Grows on mounts without rank 0, by as much as their ranks train.",
    ),
    Definition(
        "cluster_rows_heard",
        "Samples of other nodes' batches that came here to be scored",
        "Grows on the mount with rank 0. Much less than all others have sent: the manager is too slow.",
    ),
    Definition(
        "cluster_rows_lost",
        "Samples of trainers' batches that the server of `cluster` did not take",
        "Rising: the server is down or its memory full, and scores grow old; the log says why.",
    ),
    Definition(
        "cluster_scores_heard",
        "Scores that another node's manager has made, and this one has taken",
        "Stands still on a mount without rank 0 while a training runs: rank 0's mount, or the server, fails.",
    ),
    Definition(
        "cluster_plans_heard",
        "Plans of jobs on other nodes, of samples that this one keeps for them",
        "Stands still while jobs on other nodes go by plans of a list that one here has too: the server fails.",
    ),
    Definition(
        "cluster_plans_lost",
        "Plans that the server of `cluster` did not take, and plans of other nodes of which this one has not heard all",
        "Rising: the server is down or slow, and some homes do not keep what a job reads next until its next epoch.",
    ),
    Definition(
        "internal_errors",
        "Exceptions in request handlers that nobody expected; each is logged",
        "Always 0; anything else is a bug, please report it with the log.",
    ),
    Definition(
        "answers",
        "Requests of the kernel that were answered, also with an error; the count is updated now and then",
        "Grows while there are readers. Twenty deaths of workers in a row, without one in between, end the mount.",
    ),
    Definition(
        "queue_races",
        "Times a worker woke up for a request that another worker had already taken",
        "The price of several workers; each costs some microseconds.",
    ),
    Definition(
        "process_starts",
        "Workers and managers that have started and were ready to work",
        "`workers` and one manager after a mount; more for every restart.",
    ),
    Definition(
        "worker_restarts",
        "Workers that were started again after they had ended unexpectedly",
        "More than 0: the log says how each ended, and how long readers waited. Many in a minute: see "
        "`deadly_requests`.",
    ),
    Definition(
        "manager_restarts",
        "Managers that were started again after they had ended unexpectedly",
        "More than 0: the log says how each ended. Reads went on meanwhile.",
    ),
    Definition(
        "resends",
        "Times the kernel was asked to send its unanswered requests again",
        "One for each group of dead workers that was replaced.",
    ),
    Definition(
        "deadly_requests",
        "Requests answered with EIO because worker after worker had died at them",
        "Always 0; anything else is a bug, or a file that takes more memory than there is. The log names each "
        "request and its inode; please report it.",
    ),
    Definition(
        "store_rebuilds",
        "Times the store was found damaged and rebuilt",
        "The cache began empty that often: after a power loss, or because the disk damages it.",
    ),
)

# Counters that stay 0 while all is well.
TROUBLES = frozenset(
    {
        "checksum_failures", "store_failures", "events_dropped", "hook_malformed", "hook_refused", "internal_errors",
        "worker_restarts", "manager_restarts", "deadly_requests", "store_rebuilds", "source_timeouts", "source_errors",
        "view_makers_lost", "cluster_rows_lost", "cluster_plans_lost",
    }
)  # fmt: skip

# Upper bounds of the latency histograms, in microseconds.
BUCKETS_US = (10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 1_000_000, 10_000_000)

HISTOGRAMS = (
    Definition(
        "open_hit_seconds",
        "Time in the daemon for an open served from the cache",
        "What the cache itself costs; the kernel's share of an open is not in it.",
    ),
    Definition(
        "open_miss_seconds",
        "Time in the daemon for an open that fetched from the source",
        "Latency of the source, waiting for a free slot (`fetches`) included.",
    ),
)

# The manager computes a gauge when somebody reads it.
GAUGES = (
    Definition(
        "capacity_bytes",
        "How many bytes the cache may hold",
        "Grows while a share of an unmeasured source is being measured.",
    ),
    Definition(
        "used_bytes",
        "Bytes of file content in the cache, landing included",
        "Above `capacity_bytes` only for the moment in which a smaller capacity is being made true.",
    ),
    Definition(
        "entries", "Records in the cache, landing included", "`used_bytes / entries` is the mean size of a record."
    ),
    Definition(
        "disk_bytes",
        "Bytes of the store's files, in which a small sample takes whole pages",
        "Leave this much room on the disk: about 11 % above `used_bytes` for files of 100 kB, more for small ones.",
    ),
    Definition("known_files", "Names in the catalogue", "Equals the names of the source after a full scan."),
    Definition(
        "hit_ratio",
        "Share of the opens, those that were not seen among them, that did not wait for the source",
        "`(opens_hit + page_cache_reads) / (opens + page_cache_reads)`, since the mount; for the last epoch take "
        "the counters' increase.",
    ),
    Definition(
        "origin_bytes_per_open",
        "origin_bytes for each open, those that were not seen among them",
        "Compared with the mean file size: the share that the source still serves.",
    ),
    Definition(
        "source_reachable", "1 while the source answers, else 0", "Alert on 0. Cached files are served all the same."
    ),
    Definition(
        "cluster_up",
        "0 while the server of `cluster` fails, else 1",
        "Alert on 0: what the nodes of a training learn is not shared.",
    ),
    Definition("workers", "Worker processes", "As configured."),
    Definition("uptime_seconds", "Seconds since the mount", "A fall is a new mount: counters begin at 0."),
)

# What the sections hold, one value each; which sections there are depends on the policy.
SECTION_BYTES = Definition(
    "section_bytes",
    "Bytes of file content by section",
    "One value for each `section`: what the policy keeps, the `blocks` of large files, and `landing`.",
)

# Of what serves the metrics of several mounts.
MOUNT_UP = Definition("up", "1 while the mount answers, else 0", "Alert on 0: its daemon is dead, or hangs.")
# What other nodes' caches gave, one value for each `peer`; none of it is in `origin_bytes`.
PEER_COUNTERS = (
    Definition("peer_hits", "Reads of file content that another node answered", "What it spares the source."),
    Definition("peer_bytes", "Bytes of those reads", "With `origin_bytes`: where the bytes come from."),
    Definition(
        "peer_absent",
        "Questions to another node about files that it does not know so",
        "Rising: it shows another source, a view or older names, or its web server may not read the mount.",
    ),
    Definition(
        "peer_timeouts",
        "Questions to another node that it did not answer in time, or not rightly",
        "Rising: `peer_timeout` is shorter than the source takes, or the node is overloaded. The source was read.",
    ),
)
PEER_UP = Definition("peer_up", "1 while another node answers, else 0", "At 0 it is asked now and then only.")

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
        """The count in each bucket, and the sum in seconds; there is one bucket more than in BUCKETS_US."""
        first = _HISTOGRAM_AT[name]
        counts = [self.total(first + index) for index in range(len(BUCKETS_US) + 1)]
        return counts, self.total(first + _HISTOGRAM_CELLS - 1) / 1e6


class _Snapshot(Collector):
    def __init__(
        self,
        shared: SharedCounters,
        gauges: Mapping[str, float],
        sections: Mapping[str, int],
        peers: Mapping[str, Mapping[str, int]],
    ) -> None:
        self._shared = shared
        self._gauges = gauges
        self._sections = sections
        self._peers = peers

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
        section = GaugeMetricFamily(f"spiderfs_{SECTION_BYTES.name}", SECTION_BYTES.help, labels=["section"])
        for name, size in self._sections.items():
            section.add_metric([name], size)
        families.append(section)
        for definition in (*PEER_COUNTERS, PEER_UP) if self._peers else ():
            kind = GaugeMetricFamily if definition is PEER_UP else CounterMetricFamily
            family = kind(f"spiderfs_{definition.name}", definition.help, labels=["peer"])
            for url, values in self._peers.items():
                family.add_metric([url], values[definition.name.removeprefix("peer_")])
            families.append(family)
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


def prometheus_text(
    shared: SharedCounters,
    gauges: Mapping[str, float],
    sections: Mapping[str, int],
    peers: Mapping[str, Mapping[str, int]] | None = None,
) -> bytes:
    """All metrics in Prometheus' text format; `peers` has the values of each other node by its URL."""
    return generate_latest(_Snapshot(shared, gauges, sections, peers or {}))
