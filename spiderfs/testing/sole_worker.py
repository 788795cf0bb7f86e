"""A worker without a supervisor."""

from __future__ import annotations

from spiderfs.daemon.restarts import REFUSED_AFTER
from spiderfs.fuse.resent_requests import HeldRequests, ResentRequests
from spiderfs.fuse.session import MAX_WAITING
from spiderfs.metrics import Counters


def notes_of_sole_worker(counters: Counters) -> HeldRequests:
    """The notes of a worker whose death nobody counts."""
    return ResentRequests(1, MAX_WAITING, REFUSED_AFTER).of_worker(0, counters)
