"""A training without a model: it knows the loss of each sample, and notes what each read returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from hook_daemon import until
from mounting import Mounted, eventually
from reading import read_afresh

from spiderfs.protocol import Batch, EpochEnd, Hello
from trainer_hook import Declaration, HookClient
from trainer_hook.connection.client import socket_finder


class Training:
    """Of samples that begin with their numbers, in eight digits."""

    def __init__(
        self,
        point: Path,
        names: Sequence[str],
        labels: npt.NDArray[np.int32],
        losses: npt.NDArray[np.float64],
        batch: int,
        vectors: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """`vectors` are the embeddings, one row for each sample; without them all samples have the same."""
        self._point = point
        self._names = names
        self._losses = losses
        self._batch = batch
        self._vectors = np.ones((len(names), 4)) if vectors is None else vectors
        self._client = HookClient(socket_finder(point, None), Hello("test", "test"))
        self._client.declare(Declaration("train", "train", [name.encode() for name in names], labels))
        self.scores = self._client.scores("train", 20.0)
        self.given: Counter[tuple[int, int]] = Counter()
        self._batches = self._epoch = 0
        self._rng = np.random.default_rng(1)

    def epoch(self, share: float = 1.0) -> None:
        """All samples of the harder half, and this share of the others."""
        order = self._rng.permutation(len(self._names))
        easy = self._losses[order] < np.median(self._losses)
        order = order[~easy | (self._rng.random(len(order)) < share)]
        for first in range(0, len(order), self._batch):
            indices = order[first : first + self._batch]
            served = np.array([int(read_afresh(self._point / self._names[index])[:8]) for index in indices])
            self.given.update(zip(indices.tolist(), served.tolist(), strict=True))
            losses = self._losses[served].astype(np.float16)
            embeddings = self._vectors[served].astype(np.float16)
            batch = Batch("train", self._epoch, first, indices.astype(np.uint32), embeddings, losses)
            self._client.batch(lambda batch=batch: batch)  # type: ignore[misc]
            self._batches += 1
            # Batches come at the pace of a training.
            until(lambda: self._client.counts["sent"] >= self._batches)
        self._client.epoch_end(EpochEnd(self._epoch, 0.5))
        self._epoch += 1
        # The daemon answers after it has acted on the earlier messages.
        self._client.scores("train", 20.0)

    def pin(self, indices: npt.NDArray[np.int64]) -> int | None:
        return self._client.pin("train", indices, 20.0)

    def until_redirected(self, mount: Mounted, more_than: float) -> None:
        """Train until so many reads were redirected; a name keeps its meaning for two seconds."""

        def enough() -> bool:
            self.epoch()
            return mount.metric("redirects") > more_than

        eventually(enough, what="redirects")

    def close(self) -> None:
        self._client.close()
