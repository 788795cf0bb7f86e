"""The base of all samplers, which draws a whole epoch at a time and can resume, and two samplers for a cache.

`EchoSampler` repeats samples while they are cached (data echoing, Choi et al., arXiv:1907.05550). `PoolSampler` draws
neighbours of the list shortly after each other, so that a few requests fetch many samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Sampler

from trainer_hook.connection.client import HookClient
from trainer_hook.ranks import rank_and_world, share_of_rank
from trainer_hook.resuming import NO_STATE, Pass, Passes, restored

Draws = npt.NDArray[np.uint32]
Scores = npt.NDArray[np.float32]


@dataclass(eq=False)
class SampledEpoch(Pass):
    """The draws of an epoch over all ranks, and the scores by which they were drawn (None: without scores).

    `before` of the draws were consumed before this process resumed the epoch, and the training has taken `position` of
    this rank's share of the rest.
    """

    number: int
    order: Draws
    scores: Scores | None = None
    before: int = 0
    position: int = 0
    probabilities: npt.NDArray[np.float64] | None = None

    @property
    def own_draws(self) -> int:
        """How many of the draws each rank has in this process."""
        return -(-(len(self.order) - self.before) // rank_and_world()[1])


def whole_number(name: str, value: object, least: int) -> int:
    """The value of an option; raises ValueError unless it is a whole number of at least `least`."""
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = least - 1
    if found < least:
        raise ValueError(f"{name}={value}: give a whole number of at least {least}")
    return found


class EpochSampler(Sampler[int]):
    """Draws epochs of `draws` draws over all ranks; a subclass says how, in `_draw`.

    All ranks make the same draws, and each rank takes every world_size-th of them. So a state of any rank serves a
    training with any number of ranks.
    """

    def __init__(self, samples: int, *, draws: int | None = None, seed: int = 0) -> None:
        self.samples = whole_number("samples", samples, 1)
        self._draws = self.samples if draws is None else whole_number("draws", draws, 1)
        self._seed = whole_number("seed", seed, 0)
        self._client: HookClient | None = None
        self._list = ""
        self._whole = 1
        self.epoch = 0
        # The training's epoch, which has the number `epoch`; None before the first one, and once `set_epoch` has named
        # another one.
        self.current: SampledEpoch | None = None
        self._passes: Passes[SampledEpoch] = Passes()
        self._resuming = False
        # By how much this sampler's epochs are ahead of the numbers that `set_epoch` is given.
        self._ahead_of_caller = 0
        self._ahead: SampledEpoch | None = None

    def bind(self, client: HookClient, name: str, whole: int = 1) -> None:
        """Use the list `name` of `client` from the next epoch on; the caller calls `took` from now on.

        The loader leaves out fewer than `whole` draws at the end of an epoch, because they make no batch (drop_last).
        """
        self._client, self._list, self._whole = client, name, whole

    def unbind(self) -> None:
        """Ask the client nothing more; the sampler then counts what it has handed out as taken."""
        self._client = None

    def set_epoch(self, epoch: int) -> None:
        """Draw this epoch next; without this call epochs follow each other.

        After `load_state_dict`, the number of the state's epoch lets that epoch go on, and a later one leaves it out. A
        lower number comes from a caller that counts its epochs from the start of the process, as accelerate does: its
        epochs are counted on from that of the state.
        """
        if self._resuming and epoch < self.epoch:
            self._ahead_of_caller = self.epoch - epoch
        epoch += self._ahead_of_caller
        if epoch != self.epoch:
            self.epoch, self.current, self._resuming = epoch, None, False

    def __len__(self) -> int:
        return -(-self._draws // rank_and_world()[1])

    def __iter__(self) -> Iterator[int]:
        # This is a generator, so it begins at the first draw: a data loader makes iterators that it never uses.
        if self._resuming:
            self._resuming = False
        else:
            self._begin()
        own = self.current
        assert own is not None
        self._passes.begin(own)
        try:
            for number, index in enumerate(share_of_rank(own.order[own.before :]).tolist(), 1):
                if self._client is None:
                    own.position = number
                    self._passes.took(own)
                    self.go_back(self._passes.now)
                yield index
        finally:
            self._passes.over(own)
            if self._client is None:
                self.go_back(self._passes.now)

    def go_back(self, to: SampledEpoch | None) -> None:
        """The pass that draws `to` is the training's, and what another one has begun was a look.

        An epoch that was restored or named by `set_epoch` stays the next one.
        """
        if to is not None and self.current is not None and not self._resuming:
            self.current, self.epoch = to, to.number

    def go_on_again(self, look: SampledEpoch) -> bool:
        """The pass that went on with the epoch of a state was a look, if it left any of it: the next one goes on."""
        if look is not self.current or not look.before or look.position >= look.own_draws:
            return False
        self.current, self._resuming = replace(look, position=0), True
        return True

    @property
    def settled(self) -> float:
        """The share of an epoch after which `draw_ahead` may draw the next one."""
        return 0.0

    def draw_ahead(self) -> list[int] | None:
        """Draw the next epoch now, and return this rank's share; None if the epoch is to be drawn when it begins."""
        self._ahead = self._draw(self.epoch + 1)
        share: list[int] = share_of_rank(self._ahead.order).tolist()
        return share

    def offer(self, evaluate: Callable[[npt.NDArray[np.int64]], Scores | None]) -> None:
        """Offer an evaluation: `evaluate` returns the losses of samples by the current model, or None if it cannot."""

    def took(self, samples: int, epoch: SampledEpoch) -> None:
        """Note that the training has taken this many samples of an epoch; its loader workers have drawn more."""
        epoch.position += samples
        if epoch.own_draws - epoch.position < self._whole:
            # The rest makes no batch: a training that resumes here begins the next epoch.
            epoch.position = epoch.own_draws

    def end_epoch(self) -> None:
        """End the current epoch, also if the training has not taken all of its draws."""
        if self.current is not None:
            self.current.position = self.current.own_draws

    def trained(self, indices: Draws, losses: npt.NDArray[np.floating]) -> None:
        """Note the losses of a batch. The hook's sending thread calls this, perhaps after `epoch_end`."""

    def epoch_end(self, accuracy: float | None) -> None:
        """Note that an epoch has ended; `accuracy` is a share, or None if it is not known."""

    def weights(self, indices: npt.ArrayLike, clip: float | None = None) -> Tensor:
        """The weights 1/(N q) of these samples: weighted losses have the expectation of losses under uniform draws."""
        weights = torch.ones(np.shape(indices))
        return weights if clip is None else weights.clamp(max=clip)

    def probabilities(self) -> npt.NDArray[np.float64]:
        """The chance q of each sample at each draw of the current epoch."""
        return np.full(self.samples, 1 / self.samples)

    def state_dict(self) -> dict[str, Any]:
        """The samples of the epoch that the job has consumed; a run can resume from it on any number of ranks.

        It is the same on all ranks that have taken equally many draws; save that of rank 0.
        """
        now, consumed, order = self.current, 0, None
        if now is not None:
            consumed = min(now.before + now.position * rank_and_world()[1], len(now.order))
            order = torch.from_numpy(now.order.astype(np.int64))
        return {"samples": self.samples, "epoch": self.epoch, "consumed": consumed, "order": order}

    def at_position(self, taken: int, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `ask` returns while this sampler's state says that the training has taken `taken` of its draws."""
        now = self.current
        if now is None:
            return ask()
        position, now.position = now.position, taken
        try:
            return ask()
        finally:
            now.position = position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`; raises ValueError for a state of another data set."""
        try:
            self._restore(state)
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(NO_STATE) from exc

    def _restore(self, state: dict[str, Any]) -> None:
        """As `load_state_dict`; a subclass reads its own part first."""
        epoch, order = operator.index(state["epoch"]), state["order"]
        progress = restored({**state, "order": [] if order is None else order}, self.samples)
        self.epoch = epoch
        self.current = None if order is None else SampledEpoch(epoch, progress.order, before=progress.consumed)
        self._ahead, self._ahead_of_caller = None, 0
        self._resuming = progress.consumed < len(progress.order)

    @property
    def left_to_draw(self) -> int:
        """How many draws this rank makes of an epoch that is about to go on; 0 if none is."""
        return self.current.own_draws if self._resuming and self.current is not None else 0

    # -- drawing

    def _draw(self, number: int) -> SampledEpoch:
        """Draw the epoch of this number. All ranks call this when an epoch begins."""
        raise NotImplementedError

    def _begin(self) -> None:
        if self.current is not None:
            self.epoch += 1
        epoch, self._ahead = self._ahead, None
        if epoch is None or epoch.number != self.epoch:
            epoch = self._draw(self.epoch)
        self.current = epoch


# The shortest distance between two draws of a sample, as a share of the longest distance.
NEAREST = 0.5


class EchoSampler(EpochSampler):
    """Draws each sample `times` times within a window, and then again only after all other samples had their turn.

    This sampler needs no scores. A **cycle** is `times` epochs, in which each sample is drawn exactly `times` times. So
    all samples are drawn equally often and losses need no weights; only the order differs from that of a shuffle.

    All draws of a sample lie within `window`: while they are made, at most this share of all samples is drawn for the
    first time. Give the share of the samples that the cache holds. On average three quarters of the samples in a window
    are drawn again later, and the cache has to keep these. With a plan it keeps just these, and the source is read
    1/`times` as often. Each draw is decoded and augmented again.

    The draws follow from the seed and the number of the epoch. So ranks need not agree on them, and the next epoch is
    known when an epoch begins.
    """

    def __init__(self, samples: int, *, times: int = 2, window: float = 0.2, seed: int = 0) -> None:
        """`samples` is the length of the data set; an epoch has as many draws, over all ranks."""
        super().__init__(samples, seed=seed)
        if not 0 < window <= 1:
            raise ValueError(f"window={window}: give a share of the samples, above 0 and at most 1")
        self._times = whole_number("times", times, 1)
        self._window = window

    def _draw(self, number: int) -> SampledEpoch:
        cycle, part = divmod(number, self._times)
        kept = self._kept(cycle)
        order = self._cycle(cycle, kept)[part * len(kept) : (part + 1) * len(kept)]
        return SampledEpoch(number, order.astype(np.uint32))

    def _kept(self, cycle: int) -> npt.NDArray[np.int64]:
        """The samples that this cycle draws."""
        return np.arange(self.samples)

    def _cycle(self, number: int, kept: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The draws of `times` epochs: first draws by a permutation, each further draw at a distance from the last."""
        rng = np.random.default_rng([self._seed, number])
        # Draws are made in the order of these times; the first draws come at 0, 1, 2, ...
        times = np.empty((self._times, len(kept)))
        times[0] = np.arange(len(kept))
        if self._times > 1:
            longest = self._window * self.samples / (self._times - 1)
            distances = rng.uniform(NEAREST * longest, longest, (self._times - 1, len(kept)))
            times[1:] = times[0] + np.cumsum(distances, axis=0)
        permutation = rng.permutation(kept)
        drawn: npt.NDArray[np.int64] = permutation[np.argsort(times, axis=None, kind="stable") % len(kept)]
        return drawn


class PoolSampler(EpochSampler):
    """Draws each sample once in an epoch, from a pool that random blocks of neighbours fill.

    This is a weaker shuffle, for data sets in archives at a source where each request takes long. Neighbours are
    samples side by side in the list of the data set, and so side by side in an archive that was packed in this order.
    An epoch cuts the list into blocks of `block` samples, at other places each time, and takes them in a random order.
    Where the pool has room for a block, all of it enters; each draw is one of the samples in the pool, all with the
    same chance. A block of 4 costs about as many requests as a larger one, and far less accuracy if neighbours are of
    one class (docs/results/pool_sampler.json).

    `pool` is a share of the samples. Give the share that the cache holds: with a plan the cache then keeps what is in
    the pool, and a block comes from an archive with a few requests. Two neighbours lie about so far apart: 0.17 of an
    epoch with a pool of 0.2, and 0.33 with a uniform shuffle.

    The draws follow from the seed and the number of the epoch. So ranks need not agree on them, and the next epoch is
    known when an epoch begins. Losses need no weights.
    """

    def __init__(self, samples: int, *, block: int = 4, pool: float = 0.2, seed: int = 0) -> None:
        """`samples` is the length of the data set; an epoch has as many draws, over all ranks."""
        super().__init__(samples, seed=seed)
        if not 0 < pool <= 1:
            raise ValueError(f"pool={pool}: give a share of the samples, above 0 and at most 1")
        self._block = min(whole_number("block", block, 1), samples)
        self._room = max(self._block, round(pool * samples))

    def _draw(self, number: int) -> SampledEpoch:
        rng = np.random.default_rng([self._seed, number])
        cuts = np.arange(rng.integers(self._block), self.samples, self._block)
        blocks = np.split(np.arange(self.samples, dtype=np.uint32), cuts)
        return SampledEpoch(number, through_pool((blocks[at] for at in rng.permutation(len(blocks))), self._room, rng))


def through_pool(
    blocks: Iterable[npt.NDArray[np.uint32]], room: int, rng: np.random.Generator
) -> npt.NDArray[np.uint32]:
    """The samples of all blocks in the order in which they leave a pool of `room` samples; no block has more."""
    pool: list[int] = []
    drawn: list[int] = []
    for block in blocks:
        for chance in rng.random(max(0, len(pool) + len(block) - room)).tolist():
            at = int(chance * len(pool))
            pool[at], pool[-1] = pool[-1], pool[at]
            drawn.append(pool.pop())
        pool += block.tolist()
    return np.concatenate([np.array(drawn, np.uint32), rng.permutation(np.array(pool, np.uint32))])
