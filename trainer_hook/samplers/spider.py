"""A sampler that draws samples by the daemon's scores, so that important samples come more often."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainer_hook.connection.client import Client
from trainer_hook.ranks import from_first_rank, rank_and_world
from trainer_hook.resuming import NO_STATE, dealt, restored

log = logging.getLogger("trainer_hook")


# How long the sampler waits for scores in the middle of an epoch, where the training should not wait for a slow daemon.
_MEANWHILE_S = 0.25


class Epoch(NamedTuple):
    """The draws of an epoch over all ranks, and the scores by which they were drawn (None: uniformly)."""

    number: int
    scores: npt.NDArray[np.float32] | None
    order: npt.NDArray[np.uint32]


class SpiderSampler(Sampler[int]):
    """Draws samples with replacement, in proportion to their scores; `attach` connects the sampler to the daemon.

    While there are no scores, an epoch is a random permutation. `coverage` is the share of the draws that are uniform,
    whatever the scores are. Multiply the losses by weights, too: with `hook.weights(clip=4.0)` and the default coverage
    a training lost 0.7 points of accuracy, and with neither of the two it lost four (docs/TRAINING.md).

    All ranks make the same draws, by the scores that rank 0 has got, and each rank takes every world_size-th of them.
    So a state of any rank serves a training with any number of ranks. With one rank the next epoch is drawn while the
    current one runs, by the scores of that moment: when the share `settled` of the batches has been handed to the
    loader, or with the last batch if the current epoch was drawn without scores. The sooner the next epoch is drawn,
    the better the daemon knows what to keep; the later, the newer are the scores. docs/PREFETCHING.md has measurements
    of the cost in bytes. If `settled` is 1, or if the mount follows no plans, an epoch is drawn when it begins, by the
    scores of that moment.
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
        """`samples` is the length of the data set; `draws` is that of an epoch over all ranks (default: `samples`)."""
        if samples < 1 or (draws is not None and draws < 1):
            raise ValueError(f"samples={samples}, draws={draws}: give at least one of each")
        if not 0 <= coverage <= 1:
            raise ValueError(f"coverage={coverage}: give a share between 0 and 1")
        if not 0 <= settled <= 1:
            raise ValueError(f"settled={settled}: give a share between 0 and 1")
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
        # The draws of the current epoch over all ranks, how many of them were consumed before this process went on with
        # it, and how many of this rank's share of the rest the training has taken.
        self._order: npt.NDArray[np.uint32] | None = None
        self._before = 0
        self._position = 0
        self._resuming = False
        # By how much this sampler's epochs are ahead of the numbers that `set_epoch` is given.
        self._ahead_of_caller = 0
        self._ahead: Epoch | None = None

    def bind(self, client: Client, name: str, whole: int = 1) -> None:
        """Ask `client` for the scores of the list `name` from the next epoch on; the caller calls `took` from now on.

        The loader leaves out fewer than `whole` draws at the end of an epoch, because they make no batch (drop_last).
        """
        self._client, self._list, self._whole = client, name, whole

    def unbind(self) -> None:
        """Ask for no more scores; the sampler then counts what it has handed out as taken."""
        self._client = None

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch next; without this call the epochs come in order.

        After `load_state_dict`, the number of the state's epoch lets that epoch go on, and a later one leaves it out. A
        lower number comes from a caller that counts its epochs from the start of the process, as accelerate does: its
        epochs are counted on from that of the state.
        """
        if self._resuming and epoch < self.epoch:
            self._ahead_of_caller = self.epoch - epoch
        epoch += self._ahead_of_caller
        if epoch != self.epoch:
            self.epoch, self._order, self._resuming = epoch, None, False

    def __len__(self) -> int:
        return -(-self._draws // rank_and_world()[1])

    def offer(self, evaluate: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float32] | None]) -> None:
        """Offer an evaluation, which returns the losses of samples by the current model. This sampler ignores it."""

    def __iter__(self) -> Iterator[int]:
        # This is a generator, so it begins at the first draw: a data loader makes iterators that it never uses.
        if self._resuming:
            self._resuming = False
        else:
            self._begin()
        assert self._order is not None
        for number, index in enumerate(dealt(self._order[self._before :]).tolist(), 1):
            if self._client is None:
                self._position = number
            yield index

    @property
    def settled(self) -> float:
        """The share of an epoch after which the next one is drawn."""
        return 1.0 if self._scores is None else self._settled

    def draw_ahead(self) -> list[int] | None:
        """Draw the next epoch now; None if it is to be drawn when it begins, or if the scores do not come at once.

        With several ranks it is drawn when it begins: all ranks would have to wait for each other here, to share the
        scores.
        """
        if rank_and_world()[1] > 1 or self._settled == 1:
            return None
        scores = self._ask(min(self._scores_timeout_s, _MEANWHILE_S))
        if (scores is None and self._scores is not None) or (self._client and not self._client.follows_plans):
            return None
        self._ahead = self._draw(self.epoch + 1, scores)
        order: list[int] = self._ahead.order.tolist()
        return order

    def took(self, samples: int) -> None:
        """Note that the training has taken so many samples; its loader workers have drawn more."""
        self._position += samples
        if self._order is not None and self._drawn() - self._position < self._whole:
            # The rest makes no batch: a training that resumes here begins the next epoch.
            self.left()

    def left(self) -> None:
        """Note that the training has ended the current epoch, also if it has not taken all of its draws."""
        self._position = self._drawn()

    def trained(self, indices: npt.NDArray[np.uint32], losses: npt.NDArray[np.floating]) -> None:
        """Note the losses of a batch. The hook's sending thread calls this, perhaps after `epoch_end`."""

    def epoch_end(self, accuracy: float | None) -> None:
        """Note that an epoch has ended; `accuracy` is a share, or None if it is not known."""

    def weights(self, indices: npt.ArrayLike, clip: float | None = None) -> Tensor:
        """The weights 1/(N q) of these samples: weighted losses have the expectation of losses under uniform draws."""
        probabilities = self.probabilities()[np.asarray(indices, dtype=np.int64)]
        weights = torch.from_numpy((1 / (self._samples * probabilities)).astype(np.float32))
        return weights if clip is None else weights.clamp(max=clip)

    def probabilities(self) -> npt.NDArray[np.float64]:
        """The chance q of each sample at each draw of the current epoch."""
        if self._probabilities is None:
            self._probabilities = self._chances(self._scores)
        return self._probabilities

    def state_dict(self) -> dict[str, Any]:
        """The state from which a training can resume on any number of ranks: what the job has consumed of the epoch.

        It is the same on all ranks that have taken equally many draws; save that of rank 0.
        """
        order, scores = self._order, self._scores
        consumed = 0 if order is None else min(self._before + self._position * rank_and_world()[1], len(order))
        return {
            "epoch": self.epoch,
            "consumed": consumed,
            "order": None if order is None else torch.from_numpy(order.astype(np.int64)),
            "scores": None if scores is None else torch.from_numpy(scores.copy()),
        }

    def as_drawn(self, drawn: int, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `ask` returns while the state of this sampler says that the training has taken so many draws."""
        taken, self._position = self._position, drawn
        try:
            return ask()
        finally:
            self._position = taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state` was taken; raises ValueError for a state that is not one of this data set."""
        try:
            epoch, order, scores = int(state["epoch"]), state["order"], state["scores"]
            progress = restored({**state, "order": [] if order is None else order}, self._samples)
            scores = None if scores is None else np.asarray(scores).astype(np.float32)
        except (KeyError, TypeError) as exc:
            raise ValueError(NO_STATE) from exc
        if scores is not None and scores.shape != (self._samples,):
            raise ValueError(f"the state is of another list: it has {len(scores)} scores for {self._samples} samples")
        self.epoch, self._before, self._position = epoch, progress.consumed, 0
        self._order = None if order is None else progress.order
        self._scores = scores
        self._probabilities = None
        self._ahead, self._ahead_of_caller = None, 0
        self._resuming = self._before < len(progress.order)

    @property
    def left_to_draw(self) -> int:
        """How many draws this rank makes of an epoch that is about to go on; 0 if none is."""
        return self._drawn() if self._resuming else 0

    # -- drawing

    def _drawn(self) -> int:
        """How many draws of the current epoch each rank has in this process; 0 before the first epoch."""
        return 0 if self._order is None else -(-(len(self._order) - self._before) // rank_and_world()[1])

    def _begin(self) -> None:
        if self._order is not None:
            self.epoch += 1
        epoch, self._ahead = self._ahead, None
        if epoch is None or epoch.number != self.epoch:
            epoch = self._draw(self.epoch, self._ask(self._scores_timeout_s))
        self._scores, self._order, self._before, self._position = epoch.scores, epoch.order, 0, 0
        self._probabilities = None

    def _draw(self, number: int, scores: npt.NDArray[np.float32] | None) -> Epoch:
        rng = np.random.default_rng([self._seed, number])
        if scores is None:
            rounds = -(-self._draws // self._samples)
            order = np.concatenate([rng.permutation(self._samples) for _ in range(rounds)])[: self._draws]
        else:
            order = self._pick(scores, self._draws, rng)
        return Epoch(number, scores, order.astype(np.uint32))

    def _pick(
        self, scores: npt.NDArray[np.float32], draws: int, rng: np.random.Generator
    ) -> npt.NDArray[np.signedinteger[Any]]:
        """Draw an epoch by scores."""
        edges = np.cumsum(self._chances(scores))
        drawn = np.searchsorted(edges, rng.random(draws) * edges[-1], side="right")
        picked: npt.NDArray[np.signedinteger[Any]] = np.minimum(drawn, self._samples - 1)
        return picked

    def _ask(self, timeout_s: float) -> npt.NDArray[np.float32] | None:
        asks = self._client is not None and rank_and_world()[0] == 0
        shared: npt.NDArray[np.float32] | None = from_first_rank(self._asked(timeout_s) if asks else None)
        return shared

    def _asked(self, timeout_s: float) -> npt.NDArray[np.float32] | None:
        """The scores by which rank 0 draws: the chance of a sample is in proportion to its score. None: uniformly."""
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
