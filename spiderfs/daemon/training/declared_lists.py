"""How lists come into memory when trainers declare them, and leave it when no trainer uses them any more.

All ranks of a training share one list, for a list is known by its content. It stays in memory for a while after its
last trainer has left, so that the next training on it finds it as it was. When it leaves, its scores are saved, the
policy forgets its labels and the scores of its samples, and its redirects are withdrawn. All state belongs to the
manager's event loop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import trio

from spiderfs.core.teaching import Teaching
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.known_list import KnownList, inodes_of, leave_out_contradictions
from spiderfs.daemon.training.known_lists import KnownLists, digest_of
from spiderfs.daemon.training.redirect_publisher import RedirectPublisher
from spiderfs.daemon.training.scoring import BatchScoring
from spiderfs.daemon.training.trainer import SampleList, Trainer
from spiderfs.daemon.training.trainers import Trainers
from spiderfs.errors import ProtocolError
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.lister import Lister

log = logging.getLogger(__name__)

# So long a list stays in memory without a trainer. It takes 15 MB for 100,000 samples, and its scoring some 400 bytes a
# sample.
GRACE_S = 60.0
# All lists together may have so many samples; each sample takes the manager 150 bytes before it is scored.
MAX_SAMPLES = 32_000_000
# So many samples are forgotten between two chances for other tasks, in some milliseconds.
_AT_A_TIME = 10_000


class DeclaredLists:
    def __init__(
        self,
        catalogue: Catalogue,
        lister: Lister,
        cache: CacheControl,
        teaching: Teaching,
        lists: KnownLists,
        trainers: Trainers,
        scoring: BatchScoring,
        redirects: RedirectPublisher,
        scores_directory: Path,
    ) -> None:
        self._catalogue = catalogue
        self._lister = lister
        self._cache = cache
        self._teaching = teaching
        self._lists = lists
        self._trainers = trainers
        self._scoring = scoring
        self._redirects = redirects
        self._scores_directory = scores_directory
        # The time at which each list was first found without a trainer. A list that is being declared counts as used.
        self._unused_since: dict[str, float] = {}
        self._declared_now: list[str] = []

    # -- lists come

    async def declare(self, trainer: Trainer, samples: SampleList) -> int:
        """Take a list that a trainer declares; returns how many of its paths are unknown.

        Raises ProtocolError if all lists together would have more than MAX_SAMPLES.
        """
        digest = digest_of(samples)
        with self._declaring(digest):
            await self._make_room(digest, len(samples))
            inodes = await inodes_of(samples, self._catalogue, self._lister)
            unknown = int((inodes == 0).sum())
            leave_out_contradictions(inodes, samples.labels)
            known_list = self._lists.get(digest)
            if known_list is None or not np.array_equal(known_list.inodes, inodes):
                number = self._lists.number_of(digest)
                known_list = KnownList(number, digest, samples, inodes, self._scores_directory / digest)
                self._lists.put(known_list)
                await self._scoring.introduce(known_list)
            self._trainers.declare(trainer, samples.name, known_list)
        return unknown

    @contextlib.contextmanager
    def _declaring(self, digest: str) -> Iterator[None]:
        """The list with this digest does not leave memory meanwhile."""
        self._declared_now.append(digest)
        try:
            yield
        finally:
            self._declared_now.remove(digest)

    async def _make_room(self, digest: str, samples: int) -> None:
        if self._lists.samples_beside(digest) + samples > MAX_SAMPLES:
            await self.let_go(0.0)
        if self._lists.samples_beside(digest) + samples > MAX_SAMPLES:
            raise ProtocolError(
                f"a list of {samples} samples: all lists of this mount together have {MAX_SAMPLES} at most", "too-large"
            )

    # -- lists leave

    async def let_go(self, grace_s: float = GRACE_S) -> None:
        """Let lists leave memory that no trainer has used for so long; their scores are saved first."""
        now = trio.current_time()
        self._unused_since = {
            known_list.digest: self._unused_since.get(known_list.digest, now)
            for known_list in self._lists
            if not self._is_used(known_list.digest)
        }
        for digest, since in list(self._unused_since.items()):
            known_list = self._lists.get(digest)
            if known_list is None or now - since < grace_s:
                continue
            try:
                await self._scoring.save_list(known_list)
            except OSError as exc:
                log.warning(
                    "cannot save the scores of an unused list (%s): it stays in memory until the cache's disk has room",
                    exc.strerror,
                )
                continue
            # A trainer may have declared the list while it was saved.
            if self._lists.get(digest) is known_list and not self._is_used(digest):
                await self._forget(known_list)

    def _is_used(self, digest: str) -> bool:
        return digest in self._declared_now or self._trainers.any_uses(digest)

    async def _forget(self, known_list: KnownList) -> None:
        self._lists.remove(known_list)
        log.info("no trainer uses the list %s: its %d samples leave memory", known_list.name, len(known_list.keys))
        others = [other.index_of for other in self._lists]
        lonely = [inode for inode in known_list.index_of if not any(inode in other for other in others)]
        for first in range(0, max(1, len(lonely)), _AT_A_TIME):
            self._cache.apply(self._teaching.end(known_list.course_id, lonely[first : first + _AT_A_TIME]))
            await trio.lowlevel.checkpoint()
            if self._is_used(known_list.digest):
                # The list was declared anew, and with it its scores and redirects.
                return
        await self._redirects.withdraw(known_list)
