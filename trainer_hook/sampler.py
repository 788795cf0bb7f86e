"""A sampler that draws samples by the daemon's scores, so that important ones come more often."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainer_hook.client import Client
from trainer_hook.ranks import from_first_rank, rank_and_world

log = logging.getLogger("trainer_hook")


# In the middle of an epoch training is not made to wait for a daemon that is slow or gone.
_MEANWHILE_S = 0.25


class Epoch(NamedTuple):
    """The draws of all ranks, and the scores that they were drawn by."""

    number: int
    scores: npt.NDArray[np.float32] | None
    order: npt.NDArray[np.uint32]


class SpiderSampler(Sampler[int]):
    """Draws with replacement in proportion to the scores; `attach` connects it to the daemon.

    While there are no scores an epoch is a permutation: uniform, and every sample is seen. `coverage` is the share of
    draws that are uniform however the scores are. Losses should be weighted, too: with `hook.weights(clip=4.0)` and
    this share half a point of accuracy was lost, with neither four (docs/TRAINING.md).

    All ranks draw the same list, with the scores that rank 0 was given, and each takes every world_size-th of it. With
    one rank the next epoch is drawn while this one runs, by the scores of that moment: when the share `settled` of its
    batches has been handed to the loader, or with the last one while it was drawn without scores. The sooner, the
    better the daemon knows what to keep; the later, the newer the scores. What that costs in bytes is measured in
    docs/PREFETCHING.md.
    """

    def __init__(
        self,
        samples: int,
        *,
        draws: int | None = None,
        seed: int = 0,
        coverage: float = 0.3,
        settled: float = 0.25,
        scores_timeout_s: float = 5.0,
    ) -> None:
        """`samples` is the length of the data set, `draws` that of an epoch over all ranks (default: the same)."""
        if samples < 1 or (draws is not None and draws < 1):
            raise ValueError(f"{draws} draws of {samples} samples: at least one of each")
        if not 0 <= coverage <= 1:
            raise ValueError(f"coverage={coverage}: a share between 0 and 1")
        if not 0 <= settled <= 1:
            raise ValueError(f"settled={settled}: a share between 0 and 1")
        self._samples = samples
        self._draws = samples if draws is None else draws
        self._seed = seed
        self._coverage = coverage
        self._settled = settled
        self._scores_timeout_s = scores_timeout_s
        self._client: Client | None = None
        self._list = ""
        self._whole = 1
        self.epoch = 0
        self._scores: npt.NDArray[np.float32] | None = None
        self._probabilities: npt.NDArray[np.float64] | None = None
        # The current epoch's draws for all ranks, and how many of this rank's the training has taken.
        self._order: npt.NDArray[np.uint32] | None = None
        self._position = 0
        self._resuming = False
        self._ahead: Epoch | None = None

    def bind(self, client: Client, name: str, whole: int = 1) -> None:
        """Ask `client` for the scores of list `name` from the next epoch on; `took` is called from now on.

        Fewer than `whole` draws at the end of an epoch are left out: no batch is made of them (drop_last).
        """
        self._client, self._list, self._whole = client, name, whole

    def unbind(self) -> None:
        self._client = None

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch next; without a call epochs follow each other."""
        if epoch != self.epoch:
            self.epoch, self._order, self._resuming = epoch, None, False

    def __len__(self) -> int:
        return -(-self._draws // rank_and_world()[1])

    def offer(self, evaluate: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32] | None]) -> None:
        """Whoever has the model offers the losses of samples by the model as it is; this sampler has no use for it."""

    def __iter__(self) -> Iterator[int]:
        # The body begins with the first draw: a data loader makes iterators that it never uses.
        if self._resuming:
            self._resuming = False
        else:
            self._begin()
        assert self._order is not None
        rank, world_size = rank_and_world()
        mine = self._order[rank::world_size]
        begun = self._position
        for number, index in enumerate(mine[begun:].tolist(), begun + 1):
            if self._client is None:
                self._position = number
            yield index

    @property
    def settled(self) -> float:
        """The share of an epoch after which the next one is drawn."""
        return 1.0 if self._scores is None else self._settled

    def draw_ahead(self) -> list[int] | None:
        """What the next epoch will be, settled now; None with several ranks, and where the scores do not come at once.

        To share the scores all ranks would have to wait for each other at this point of their training.
        """
        if rank_and_world()[1] > 1:
            return None
        scores = self._ask(min(self._scores_timeout_s, _MEANWHILE_S))
        if scores is None and self._scores is not None:
            return None
        self._ahead = self._draw(self.epoch + 1, scores)
        order: list[int] = self._ahead.order.tolist()
        return order

    def took(self, samples: int) -> None:
        """The training has taken so many of what was drawn; loader workers are ahead of that."""
        self._position += samples
        drawn = self._drawn()
        if self._order is not None and drawn - self._position < self._whole:
            # The rest makes no batch: whoever resumes here begins the next epoch.
            self._position = drawn

    def trained(self, indices: npt.NDArray[np.uint32], losses: npt.NDArray[np.floating]) -> None:
        """The losses of a batch have come, in a thread of the hook's; what it sends last may come after `epoch_end`."""

    def epoch_end(self, accuracy: float | None) -> None:
        """The training is done with an epoch; `accuracy` is a share, if it is known."""

    def weights(self, indices: npt.ArrayLike, clip: float | None = None) -> Tensor:
        """1/(N q) of these samples: a loss multiplied by it is in expectation that of uniform sampling."""
        probabilities = self.probabilities()[np.asarray(indices, dtype=np.int64)]
        weights = torch.from_numpy((1 / (self._samples * probabilities)).astype(np.float32))
        return weights if clip is None else weights.clamp(max=clip)

    def probabilities(self) -> npt.NDArray[np.float64]:
        """The chance q of each sample at each draw of the current epoch."""
        if self._probabilities is None:
            self._probabilities = self._chances(self._scores)
        return self._probabilities

    def state_dict(self) -> dict[str, Any]:
        """Where the current epoch has come to; the same for all ranks as they are at the same position."""
        order, scores = self._order, self._scores
        return {
            "epoch": self.epoch,
            "position": self._position,
            "order": None if order is None else torch.from_numpy(order.astype(np.int64)),
            "scores": None if scores is None else torch.from_numpy(scores.copy()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; raises ValueError for that of another data set."""
        order, scores = state["order"], state["scores"]
        if (scores is not None and len(scores) != self._samples) or (
            order is not None and len(order) and int(order.max()) >= self._samples
        ):
            raise ValueError(f"the state is not of a data set of {self._samples} samples")
        self.epoch, self._position = state["epoch"], state["position"]
        self._order = None if order is None else order.numpy().astype(np.uint32)
        self._scores = None if scores is None else scores.numpy().copy()
        self._probabilities = None
        self._ahead = None
        self._resuming = self._position < self._drawn()

    # -- drawing

    def _drawn(self) -> int:
        """How many draws of the current epoch each rank has; 0 before there is one."""
        return 0 if self._order is None else -(-len(self._order) // rank_and_world()[1])

    def _begin(self) -> None:
        if self._order is not None:
            self.epoch += 1
        epoch, self._ahead = self._ahead, None
        if epoch is None or epoch.number != self.epoch:
            epoch = self._draw(self.epoch, self._ask(self._scores_timeout_s))
        self._scores, self._order, self._position = epoch.scores, epoch.order, 0
        self._probabilities = None

    def _draw(self, number: int, scores: npt.NDArray[np.float32] | None) -> Epoch:
        world_size = rank_and_world()[1]
        draws = -(-self._draws // world_size) * world_size
        rng = np.random.default_rng([self._seed, number])
        if scores is None:
            rounds = -(-draws // self._samples)
            order = np.concatenate([rng.permutation(self._samples) for _ in range(rounds)])[:draws]
        else:
            order = self._pick(scores, draws, rng)
            order = order[: len(order) // world_size * world_size]
        return Epoch(number, scores, order.astype(np.uint32))

    def _pick(
        self, scores: npt.NDArray[np.float32], draws: int, rng: np.random.Generator
    ) -> npt.NDArray[np.signedinteger[Any]]:
        """The draws of an epoch by scores."""
        edges = np.cumsum(self._chances(scores))
        drawn = np.searchsorted(edges, rng.random(draws) * edges[-1], side="right")
        picked: npt.NDArray[np.signedinteger[Any]] = np.minimum(drawn, self._samples - 1)
        return picked

    def _ask(self, timeout_s: float) -> npt.NDArray[np.float32] | None:
        asks = self._client is not None and rank_and_world()[0] == 0
        shared: npt.NDArray[np.float32] | None = from_first_rank(self._asked(timeout_s) if asks else None)
        return shared

    def _asked(self, timeout_s: float) -> npt.NDArray[np.float32] | None:
        """What rank 0 draws by: for each sample a number that its chance is in proportion to."""
        assert self._client is not None
        scores = self._client.scores(self._list, timeout_s)
        if scores is not None and (len(scores) != self._samples or not scores.sum() > 0):
            log.warning("%d scores for %d samples: drawing without them", len(scores), self._samples)
            return None
        return scores

    def _chances(self, scores: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float64]:
        if scores is None:
            return np.full(self._samples, 1 / self._samples)
        shares = scores.astype(np.float64)
        chances: npt.NDArray[np.float64] = (1 - self._coverage) * shares / shares.sum() + self._coverage / self._samples
        return chances
