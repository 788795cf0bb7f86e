"""How the cache is shared between important samples and hubs, which stand in for others: the ratio of the sections.

The ratio follows from training by SpiderCache's equations (`policies/parts/elastic.py`), unless the user pins it. With
`substitute_when=late` and a plan that is followed, readers seldom get a stand-in: only for a sample whose fetch has not
begun. Then hubs get no more than 2 %, for a hub takes the room of a sample whose next use is known. (With a fifth of
the samples cached, a tenth of that for hubs costs 7 % more bytes, and 2 % of it 1 %: benchmarks/training/lookahead.py.)
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from spiderfs.core.guided import Adjustable, Divided
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.options.model import Options
from spiderfs.policies.parts.elastic import Elastic, ElasticOptions

PLANNED_RATIO = 0.98


@dataclass(frozen=True)
class RatioStatus:
    """`ratio` is None for a policy without the two sections; see `policies/parts/elastic.py` for the other names."""

    ratio: float | None
    pinned: float | None
    sigma: float
    beta: int
    delta: float
    u: float


class SectionRatio:
    def __init__(self, cache: CacheControl, options: Options) -> None:
        self._cache = cache
        self.elastic = Elastic(_elastic_options(options))
        self._epochs = options.ratio_epochs
        self._only_late = options.substitute_when == "late"
        self._epoch = 0
        self._planned = False

    def restore(self, state: bytes) -> None:
        self.elastic.restore(msgpack.unpackb(state))

    def state(self) -> bytes:
        packed: bytes = msgpack.packb(self.elastic.state())
        return packed

    def status(self) -> RatioStatus:
        elastic, policy = self.elastic, self._cache.engine.policy
        ratio = policy.ratio if isinstance(policy, Divided) else None
        return RatioStatus(ratio, elastic.pinned, elastic.sigma, elastic.beta, elastic.delta, elastic.u)

    def epoch_ended(self, epoch: int, sigmas: list[float], accuracy: float | None) -> None:
        """Note how far the scores of each list spread, and the accuracy if it is known, and adapt the ratio to them."""
        for sigma in sigmas:
            self.elastic.observe_sigma(sigma)
        if accuracy is not None:
            self.elastic.observe_accuracy(accuracy)
        self._epoch = epoch
        self._apply()

    def pin(self, share: float | None) -> None:
        """Fix the ratio, or with None let training decide it again; raises ValueError if it is not between 0 and 1."""
        self.elastic.pin(share)
        if share is not None:
            self._apply()

    def change(self, options: Options) -> None:
        """Take over live options; the ratio follows at the end of the epoch."""
        self.elastic.options = _elastic_options(options)
        self._epochs = options.ratio_epochs
        self._only_late = options.substitute_when == "late"

    def follow_schedule(self) -> None:
        """Share the cache anew if a plan is followed now and none was before, or the other way round."""
        if self._cache.engine.schedule.active != self._planned:
            self._planned = not self._planned
            self._apply()

    def _apply(self) -> None:
        """Tell the policy of the ratio, and let the store follow."""
        policy = self._cache.engine.policy
        if not isinstance(policy, Adjustable):
            return
        ratio = self.elastic.ratio(self._epoch / self._epochs)
        if self.elastic.pinned is None and self._only_late and self._cache.engine.schedule.active:
            ratio = max(ratio, PLANNED_RATIO)
        if ratio != policy.ratio:
            policy.set_ratio(ratio)
            self._cache.settle()


def _elastic_options(options: Options) -> ElasticOptions:
    return ElasticOptions(start=options.ratio_start, end=options.ratio_end)
