"""The lists that trainers have declared, known by their content: numbered, shared, and let go when nobody uses them.

All state belongs to the manager's event loop.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import trio

from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.dataset import Dataset
from spiderfs.daemon.training.trainer import Trainer
from spiderfs.errors import ProtocolError
from spiderfs.shared.redirect_table import redirect_row, redirect_rows
from spiderfs.store.store import Records

log = logging.getLogger(__name__)

# A trainer that connects again, or the next one on the same list, finds it as it was for so long. What lists take is
# then given back: 15 MB for one of 100,000 samples, and some 400 bytes a sample for what was learned of them.
GRACE_S = 60.0
# Of all lists together; each sample takes the manager 150 bytes before anything is learned of it.
MAX_SAMPLES = 32_000_000
# Samples forgotten between two chances for other tasks: some milliseconds.
_AT_A_TIME = 10_000
# A list's number has 16 bits in traces.
_MAX_NUMBER = 0xFFFF


class Lists:
    """`scoring` is held by whoever uses a dataset's scorings, `publishing` by whoever writes redirects."""

    def __init__(
        self, cache: CacheControl, records: Records, scoring: trio.CapacityLimiter, publishing: trio.Lock
    ) -> None:
        self._cache = cache
        self._records = records
        self._scoring = scoring
        self._publishing = publishing
        self.datasets: dict[str, Dataset] = {}
        """By digest."""
        self.using: dict[tuple[Trainer, str], Dataset] = {}
        """By trainer and the name that it has given the list."""
        # Lists keep their numbers, in traces too, when they are declared again.
        self._numbers: dict[str, int] = {}
        # When each list was first found unused. A list that is being declared counts as used.
        self._unused_since: dict[str, float] = {}
        self._declared_now: list[str] = []

    def number_of(self, digest: str) -> int:
        return self._numbers.setdefault(digest, len(self._numbers) % _MAX_NUMBER + 1)

    @contextlib.contextmanager
    def declaring(self, digest: str) -> Iterator[None]:
        """Until the end this list is not let go."""
        self._declared_now.append(digest)
        try:
            yield
        finally:
            self._declared_now.remove(digest)

    async def make_room(self, digest: str, samples: int) -> None:
        """Raises ProtocolError if this list would bring all lists together above MAX_SAMPLES."""
        if self._samples_beside(digest) + samples > MAX_SAMPLES:
            await self.let_go(0.0)
        if self._samples_beside(digest) + samples > MAX_SAMPLES:
            raise ProtocolError(
                f"a list of {samples} samples: all lists of this mount together have {MAX_SAMPLES} at most", "too-large"
            )

    def _samples_beside(self, digest: str) -> int:
        return sum(len(dataset.keys) for other, dataset in self.datasets.items() if other != digest)

    async def let_go(self, grace_s: float = GRACE_S) -> None:
        """Give back what lists take that nobody has used for so long; their scores are saved first."""
        now = trio.current_time()
        self._unused_since = {
            digest: self._unused_since.get(digest, now) for digest in self.datasets if not self._is_used(digest)
        }
        for digest, since in list(self._unused_since.items()):
            if now - since < grace_s:
                continue
            dataset = self.datasets[digest]
            try:
                await trio.to_thread.run_sync(dataset.save, limiter=self._scoring)
            except OSError as exc:
                log.warning(
                    "cannot save the scores of an unused list (%s): it stays in memory until the cache's disk has room",
                    exc.strerror,
                )
                continue
            # Somebody may have declared it meanwhile.
            if self.datasets.get(digest) is dataset and not self._is_used(digest):
                await self._forget(dataset)

    def _is_used(self, digest: str) -> bool:
        return digest in self._declared_now or any(dataset.digest == digest for dataset in self.using.values())

    async def _forget(self, dataset: Dataset) -> None:
        del self.datasets[dataset.digest]
        log.info("no trainer uses the list %s: its %d samples leave memory", dataset.name, len(dataset.keys))
        others = [other.place_of for other in self.datasets.values()]
        lonely = [inode for inode in dataset.place_of if not any(inode in places for places in others)]
        for first in range(0, len(lonely), _AT_A_TIME):
            policy = self._cache.guided
            if policy is not None:
                policy.forget_list(dataset.digest, lonely[first : first + _AT_A_TIME])
            await trio.lowlevel.checkpoint()
            if self._is_used(dataset.digest):
                # It was declared anew, and so are its scores and its redirects.
                return
        async with self._publishing:
            wanted = [row[0] for row in redirect_rows(self._records) if row[1] == dataset.number]
            self._records.put(redirect_row(dataset.number, inode, None) for inode in wanted)
