"""The state of a mount at one moment, as its components have told it: what `stats`, `stats.json` and `metrics` show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spiderfs.cluster.link import LinkStatus
from spiderfs.daemon.caching.cache_control import CacheStatus
from spiderfs.daemon.caching.capacity import SurveyStatus
from spiderfs.daemon.caching.prefetcher import PrefetcherStatus
from spiderfs.daemon.chosen_partition import Partition
from spiderfs.daemon.training.courses.job_accounts import JobStatus
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.options.model import Options
from spiderfs.sources.members import PeerStatus


@dataclass(frozen=True)
class MountStatus:
    """`pid` is the supervisor's, `counters` are sums over all processes, the store's files have `disk_bytes`."""

    options: Options
    pid: int
    uptime_s: float
    cache: CacheStatus
    disk_bytes: int
    known_files: int
    survey: SurveyStatus
    prefetcher: PrefetcherStatus
    trainers: Sequence[Trainer]
    jobs: tuple[JobStatus, ...]
    counters: Mapping[str, int]
    source_reachable: bool
    forms: Mapping[str, int]
    """How many samples are cached in which form."""
    partition: Partition
    peers: Mapping[str, PeerStatus]
    """What was had from each other node, by its URL."""
    next_partition: Partition | None
    """That of a mount with these options and the profile as it is now; None if it would need another profile."""
    is_member: bool = True
    """Whether this node is the home of samples; else it is none of those that `peers` names."""
    link: LinkStatus | None = None
    """That to the other nodes of trainings, by the option `cluster`."""

    def gauges(self) -> dict[str, float]:
        """The metrics of `metrics.GAUGES`."""
        return {
            "capacity_bytes": self.cache.capacity_bytes,
            "used_bytes": self.cache.used_bytes,
            "entries": self.cache.entries,
            "disk_bytes": self.disk_bytes,
            "known_files": self.known_files,
            **of_all_opens(self.counters),
            "source_reachable": float(self.source_reachable),
            "cluster_up": float(self.link is None or self.link.up),
            "workers": self.options.workers,
            "uptime_seconds": self.uptime_s,
        }


def of_all_opens(counters: Mapping[str, int]) -> dict[str, float]:
    """The gauges that count by opens, those among them that the page cache of an immutable mount answered unseen."""
    unseen = counters["page_cache_reads"]
    opens = counters["opens"] + unseen
    return {
        "hit_ratio": (counters["opens_hit"] + unseen) / opens if opens else 0.0,
        "origin_bytes_per_open": counters["origin_bytes"] / opens if opens else 0.0,
    }
