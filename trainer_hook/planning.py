"""Plans: `plan` publishes the reads of a loader, as a hook does, and nothing about the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal

from torch.utils.data import DataLoader

from trainer_hook.connection.introduce import Introduced, end_with, introduce
from trainer_hook.connection.sample_list import Sample, learned_declaration
from trainer_hook.isolation import ErrorBoundary
from trainer_hook.loader.accelerate import drawing_loader
from trainer_hook.loader.exchange import refuse_repetition, takes_part
from trainer_hook.loader.following import Follower
from trainer_hook.loader.iterating import Listener
from trainer_hook.loader.learning import LearnedRanges, observe, release
from trainer_hook.loader.planner import Planner
from trainer_hook.ranges.sample_ranges import SampleGrid, SampleRanges

log = logging.getLogger("trainer_hook")


class Planning:
    """The plans of one loader, published until `close`, to the end of a `with` block, or while the loader exists."""

    def __init__(
        self,
        loader: DataLoader[Any],
        introduced: Introduced,
        boundary: ErrorBoundary,
        *,
        draw_ahead: bool,
        share: bool,
        publish: bool = True,
        first_epoch: int = 0,
        listener: Listener | None = None,
    ) -> None:
        """A hook is the `listener` of its plans: they end with the hook, and others end with the loader."""
        declared, self._release = introduced.declaration, introduced.release
        self._connection = introduced.connection
        drawing = drawing_loader(loader)
        # A list without files has no plan.
        publish = publish and (bool(declared.paths) or declared.learns)
        self._learned: LearnedRanges | None = None
        if declared.learns and publish:
            self._learned = LearnedRanges(self._connection.key[1], len(drawing.dataset))  # type: ignore[arg-type]
            try:
                observe(drawing.dataset, self._learned.marks)
            except ValueError:
                self._release(0.0)
                raise
            self._learned.marks.mark()
        if share and declared.grid is not None:
            log.warning("the loader's samples are not exchanged: ranges of files cannot be exchanged: leave share out")
            share = False
        self.planner = Planner(
            drawing,
            introduced.connection.client,
            declared.name,
            publish=publish,
            draw_ahead=draw_ahead,
            boundary=boundary,
            names=declared.paths,
            grid=declared.grid,
            new_grid=self._new_grid,
            first_epoch=first_epoch,
            share=takes_part(share and publish, declared.paths),
        )
        self.follower = Follower(loader, self.planner, boundary, listener)
        if listener is None:
            boundary.on_failure(self.close)
        self._is_open = True
        # No one has to keep this object.
        self._call_off = end_with(drawing if listener is None else listener, introduced)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the queued messages, for at most `timeout_s`, and restore the loader."""
        if self._is_open:
            self._is_open = False
            self._call_off()
            self.follower.undo()
            if self._learned is not None and (loader := self.follower.loader()) is not None:
                release(loader.dataset)
            self.planner.close()
            self._release(timeout_s)

    def _new_grid(self) -> SampleGrid | None:
        """The extents of the ranges that are learned, if they are worth another list, which is declared then."""
        if self._learned is None or not self._learned.take():
            return None
        _, root, _ = self._connection.key
        declared = learned_declaration(self._learned.ranges(), root, self.planner.list)
        log.info("%s", self)
        self._connection.client.declare(declared)
        return declared.grid

    def state_dict(self, done: bool = True) -> dict[str, Any]:
        """What the job has consumed of the epoch, and the rest; empty between epochs.

        Say `done=False` if the training has taken a batch that it has not trained on: that is part of the rest then.
        The state is the same on all ranks that have taken equally many batches, so rank 0 alone may save it. After a
        loop has left its epoch early, the state still says where. Raises RuntimeError if another rank does not say what
        it reads. The state of a SpiderSampler is the sampler's own.
        """
        return self.planner.state_dict(done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch of the loader give only what the job had not consumed, on any number of ranks.

        Give the loader's sampler all samples of the epoch, not the rest. A sampler that is given a later epoch with
        `set_epoch` begins that one instead. Raises ValueError if the state is not one of this list.
        """
        self.planner.load_state_dict(state)

    def __repr__(self) -> str:
        _, root, _ = self._connection.key
        known = f"{self.planner.samples:,} samples" if self._learned is None else f"{self._learned}"
        return f"Planning({root}, {known}, job {self._connection.hello.job})"

    def __enter__(self) -> Planning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def plan(
    directory: str | os.PathLike[str],
    loader: DataLoader[Any],
    *,
    samples: Iterable[Sample] | None = None,
    ranges: SampleRanges | Iterable[Any] | Literal["learn"] | None = None,
    split: str = "train",
    socket: str | os.PathLike[str] | None = None,
    client_name: str = "torch",
    draw_ahead: bool = False,
    share: bool = False,
) -> Planning:
    """Publish the reads of `loader`, in order, epoch by epoch, to the spiderfs mount at or above `directory`.

    The data set must be map-style, and the sampler must have a length. Call this before the first epoch, on each rank,
    in the process that starts the loader's workers; `attach` does the same by itself. `samples` has a pair (path,
    label) for each index of the data set, in order; give it if the data set has neither `.samples` nor `.imgs`. If one
    process plans two loaders, for training and for evaluation, give them different names with `split`.

    If samples are parts of large files, give `ranges` in place of `samples`: (path, offset, length), or a list of
    these, for each index of the data set; `trainer_hook.ranges` makes them for common formats. A data set of Hugging
    Face `datasets` needs neither. With `ranges="learn"` the mount finds out in the first epoch which bytes each sample
    has, and plans the later ones; `repr` of the plan says of how many samples that is known. Call this before the
    loader starts its workers. Ranges cannot be exchanged (`share`).

    When an epoch begins, a copy of the sampler draws it, and the sampler itself draws the same batches as without a
    plan. If a sampler shares its state with such a copy, its epochs are not planned, and that is logged.

    The epochs of a sampler that uses torch's global generator are not known before they begin, because the training
    draws from that generator too. With `draw_ahead` such a sampler draws its next epoch when the last batch of this one
    is handed out: other batches than without it, and equally random. Do not use it with a sampler that the training
    passes the number of each epoch (`set_epoch`).

    With `share`, this loader exchanges samples with other jobs that read the same list with `share`: each epoch has the
    same samples, each once, in another order than the sampler's. Leave it out where the order or the batches have a
    meaning, and for validation.

    Without a mount or a daemon this logs one warning, and the training continues. Raises ValueError for a loader that
    cannot be planned, or that has a plan or a hook already.
    """
    introduced = introduce_loader(
        directory, loader, share, samples=samples, ranges=ranges, split=split, socket=socket, client_name=client_name
    )
    return Planning(loader, introduced, ErrorBoundary(), draw_ahead=draw_ahead, share=share)


def introduce_loader(
    directory: str | os.PathLike[str],
    loader: DataLoader[Any] | None,
    share: bool,
    *,
    check: bool = True,
    **options: Any,
) -> Introduced:
    """Declare the list of a loader that can be followed; `options` are those of `introduce`. Raises ValueError.

    Without `check`, an earlier hook follows the loader, and is about to be closed.
    """
    if loader is None:
        return introduce(directory, None, **options)
    drawing = drawing_loader(loader)
    if check:
        Follower.check(loader)
    if share:
        refuse_repetition(drawing)
        if options.get("ranges") is not None:
            raise ValueError("share=True: ranges of files cannot be exchanged: leave share out")
    return introduce(directory, drawing, **options)
