"""A `Training` that remembers what it received: for tests, and for trying a trainer out without a mount."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import trio

from spiderfs.daemon.training.trainer import Declared, SampleList, Trainer
from spiderfs.protocol import Batch, EpochEnd, Exchange, Plan, Progress


@dataclass
class RecordingSink:
    """`known` are the paths that exist (None: all of them); every call of `learn` takes `batch_s`."""

    known: frozenset[bytes] | None = None
    batch_s: float = 0.0
    scores_given: npt.NDArray[np.float32] | None = None
    follows_plans: bool = True
    calls: list[tuple[str, Trainer]] = field(default_factory=list)
    lists: list[tuple[Trainer, SampleList]] = field(default_factory=list)
    batches: list[tuple[Trainer, Batch]] = field(default_factory=list)
    ends: list[tuple[Trainer, EpochEnd]] = field(default_factory=list)
    plans: list[tuple[Trainer, Plan]] = field(default_factory=list)
    progress: list[tuple[Trainer, Progress]] = field(default_factory=list)
    questions: list[tuple[Trainer, Exchange]] = field(default_factory=list)
    give: Callable[[Exchange], Sequence[int]] = lambda question: ()
    pins: list[tuple[Trainer, list[int]]] = field(default_factory=list)
    warm_ups: list[tuple[Trainer, bool]] = field(default_factory=list)

    async def attached(self, trainer: Trainer) -> None:
        self.calls.append(("attached", trainer))

    async def samples(self, trainer: Trainer, samples: SampleList) -> Declared:
        self.calls.append(("samples", trainer))
        self.lists.append((trainer, samples))
        known = self.known
        unknown = [] if known is None else [path for path in samples.paths if path and path not in known]

        def first(indices: npt.NDArray[np.uint32], count: int) -> npt.NDArray[np.int64] | None:
            self.calls.append(("thinned", trainer))
            return np.arange(count) if int(indices.max(initial=0)) < len(samples) else None

        return Declared(len(unknown), (), unknown[0] if unknown else b"", first)

    def withdrawn(self, trainer: Trainer, name: str) -> None:
        self.calls.append((f"withdrawn {name}", trainer))

    async def learn(self, trainer: Trainer, name: str, batches: Sequence[Batch]) -> None:
        await trio.sleep(self.batch_s)
        self.calls.append(("learn", trainer))
        self.batches += [(trainer, batch) for batch in batches]

    async def epoch_end(self, trainer: Trainer, end: EpochEnd) -> None:
        self.calls.append(("epoch_end", trainer))
        self.ends.append((trainer, end))

    async def plan(self, trainer: Trainer, plan: Plan) -> None:
        self.calls.append(("plan", trainer))
        self.plans.append((trainer, plan))

    def progressed(self, trainer: Trainer, progress: Progress) -> None:
        self.calls.append(("come", trainer))
        self.progress.append((trainer, progress))

    def exchange(
        self, trainer: Trainer, question: Exchange, ready: npt.NDArray[np.bool_] | None
    ) -> npt.NDArray[np.uint32]:
        """What `give` says."""
        self.calls.append(("exchange", trainer))
        self.questions.append((trainer, question))
        return np.array(self.give(question), np.uint32)

    async def scores(self, trainer: Trainer, name: str) -> npt.NDArray[np.float32]:
        self.calls.append(("scores", trainer))
        return np.empty(0, np.float32) if self.scores_given is None else self.scores_given

    async def cached(self, trainer: Trainer, name: str) -> npt.NDArray[np.bool_]:
        """Every other sample."""
        self.calls.append(("cached", trainer))
        flags = np.zeros(trainer.lists[name], np.bool_)
        flags[::2] = True
        return flags

    async def pin(self, trainer: Trainer, name: str, indices: npt.NDArray[np.uint32]) -> int:
        self.calls.append(("pin", trainer))
        self.pins.append((trainer, indices.tolist()))
        return len(indices)

    async def warm_up(self, trainer: Trainer, name: str, active: bool) -> None:
        self.calls.append(("warm_up", trainer))
        self.warm_ups.append((trainer, active))

    async def detached(self, trainer: Trainer) -> None:
        self.calls.append(("detached", trainer))
