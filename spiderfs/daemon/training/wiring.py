"""Makes the parts that serve trainings, wires them together once, and passes on what the manager tells them.

    hook_server -> hook_connection -> guide -> trainers             who is attached, with which lists
                                               declared_lists       lists come into memory and leave it
                                               scoring              batches become scores and hubs
                                               plans                the draws of epochs
                                               pinboard             the samples that trainers hold
                                               ratio                the share of the importance section
                                               redirect_publisher   what workers are told of stand-ins

Each part is given what it needs of the others when it is made, and can be made alone with fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from spiderfs.core.events import Access
from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.training.declared_lists import DeclaredLists
from spiderfs.daemon.training.guide import Guide
from spiderfs.daemon.training.known_lists import KnownLists
from spiderfs.daemon.training.pinboard import Pinboard
from spiderfs.daemon.training.plans import Plans
from spiderfs.daemon.training.ratio import SectionRatio
from spiderfs.daemon.training.redirect_publisher import RedirectPublisher
from spiderfs.daemon.training.scoring import BatchScoring
from spiderfs.daemon.training.trainers import Trainers
from spiderfs.metrics import Counters
from spiderfs.options.model import Options
from spiderfs.store.store import Records
from spiderfs.trace.recording import Recording
from spiderfs.vfs.catalogue import Catalogue
from spiderfs.vfs.lister import Lister


class Training:
    def __init__(
        self,
        catalogue: Catalogue,
        lister: Lister,
        records: Records,
        cache: CacheControl,
        counters: Counters,
        trainers_file: Path,
        scores_directory: Path,
        options: Options,
        recording: Recording | None,
        wake_prefetcher: Callable[[], None],
    ) -> None:
        self.trainers = Trainers(trainers_file)
        self.lists = KnownLists()
        self.scoring = BatchScoring(cache, self.lists, counters, scores_directory, options, recording)
        self.redirects = RedirectPublisher(cache, records, self.lists, self.trainers.list_with)
        self.declared_lists = DeclaredLists(
            catalogue,
            lister,
            cache,
            self.lists,
            self.trainers,
            self.scoring,
            self.redirects,
            scores_directory,
            recording,
        )
        self.ratio = SectionRatio(cache, options)
        self.plans = Plans(cache, self.ratio, options, wake_prefetcher)
        self.pinboard = Pinboard(catalogue, cache, recording)
        self.guide = Guide(
            cache,
            self.trainers,
            self.declared_lists,
            self.scoring,
            self.plans,
            self.pinboard,
            self.ratio,
            self.redirects,
            recording,
        )

    def begin(self, ratio: bytes | None) -> None:
        """Before any trainer attaches: no reader is redirected, and the ratio goes on from what `ratio.state` gave."""
        self.trainers.publish()
        self.redirects.begin()
        if ratio is not None:
            self.ratio.restore(ratio)

    def note(self, accesses: Sequence[Access]) -> None:
        """Learn from workers' events what readers got; the engine has seen these events already."""
        self.scoring.note(accesses)
        self.redirects.note(accesses)
        self.ratio.follow_schedule()

    def change(self, options: Options) -> None:
        """Take over live options; the ratio follows at the end of the epoch."""
        self.ratio.change(options)
        self.plans.change(options)

    async def policy_changed(self) -> None:
        """Tell a policy that was just chosen of all lists and of their scores, and workers of its redirects alone."""
        self.pinboard.forget()
        for known_list in self.lists:
            await self.scoring.introduce(known_list)
        await self.redirects.publish_all()

    def end(self) -> None:
        """The mount is about to end, and so are connections: what trainers have pinned is to be saved all the same."""
        self.pinboard.forget()
