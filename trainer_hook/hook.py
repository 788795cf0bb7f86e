"""What a training script uses: `attach`, and the `Hook` that it gives."""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from spiderfs.protocol import DEFAULT_LIMITS, Batch, EpochEnd
from trainer_hook.attribution import Attribution
from trainer_hook.capture import Capture, HostCopy, Seen, as_float16, find_classifier, to_device, to_host
from trainer_hook.client import QUEUE_BATCHES, Client, Declaration
from trainer_hook.evaluation import Evaluation
from trainer_hook.following import Follower, drawing_loader
from trainer_hook.planner import Planner
from trainer_hook.planning import introduce, when_collected
from trainer_hook.sample_list import Sample
from trainer_hook.sampler import SpiderSampler

log = logging.getLogger("trainer_hook")

# After so many batches without a sight of the classifier it is time to say so.
_BLIND_BATCHES = 50


def attach(
    directory: str | os.PathLike[str],
    model: nn.Module,
    loader: DataLoader[Any] | None,
    *,
    samples: Iterable[Sample] | None = None,
    split: str = "train",
    classifier: str | nn.Module | None = None,
    embed_dim: int = DEFAULT_LIMITS.dimension,
    lookahead: int = 0,
    socket: str | os.PathLike[str] | None = None,
    client_name: str = "torch",
    queue_batches: int = QUEUE_BATCHES,
    plan: bool = True,
    draw_ahead: bool = False,
) -> Hook:
    """Tell the daemon of the spiderfs mount at or above `directory` what this training learns, and what it will read.

    Attach after the model has been wrapped (DistributedDataParallel, torch.compile) and before its first forward.
    `samples` are (path, label) in the order of the data set's indices, if it has no `.samples` or `.imgs`. `lookahead`
    is how many further batches the loop takes from the loader before the forward of one, besides the one that a loader
    of accelerate's takes by itself. With `plan`, each epoch of the loader is published as `trainer_hook.plan` does it;
    `draw_ahead` is explained there. Without a mount or a daemon this warns once, and training goes on. Raises
    ValueError for what can never work.
    """
    if not 1 <= embed_dim <= DEFAULT_LIMITS.dimension:
        raise ValueError(f"embed_dim={embed_dim}: 1 to {DEFAULT_LIMITS.dimension}")
    if lookahead < 0:
        raise ValueError(f"lookahead={lookahead}: 0, or more")
    if loader is not None:
        loader, ahead = drawing_loader(loader)
        lookahead += ahead
        Follower.check(loader)
    layer = find_classifier(model, classifier)
    declared, client, let_go = introduce(
        directory,
        loader,
        samples=samples,
        split=split,
        socket=socket,
        client_name=client_name,
        queue_batches=queue_batches,
    )
    planner = None
    if loader is not None:
        planner = Planner(loader, client, declared.name, publish=plan, draw_ahead=draw_ahead)
    return Hook(model, layer, loader, planner, declared, client, let_go, embed_dim, lookahead)


class _Ready(NamedTuple):
    """A batch that has gone through the model; it leaves at the next event, for its losses may still be given."""

    epoch: int
    step: int
    indices: npt.NDArray[np.uint32]
    parts: list[Seen]
    losses: HostCopy | None = None

    def message(self, name: str) -> Batch | None:
        """None if the model's numbers are not finite: such a step taught it nothing either."""
        embeddings = np.concatenate([part.embeddings.array() for part in self.parts])
        losses: npt.NDArray[Any] | None = None
        if self.losses is not None:
            losses = self.losses.array()
        elif all(part.losses is not None for part in self.parts):
            losses = np.concatenate([part.losses.array() for part in self.parts if part.losses is not None])
        if not np.isfinite(embeddings).all() or (losses is not None and not np.isfinite(losses).all()):
            return None
        return Batch(name, self.epoch, self.step, self.indices, embeddings, losses)


class Hook:
    """One training's connection to the daemon. All methods belong to the training's thread, and none waits."""

    def __init__(
        self,
        model: nn.Module,
        classifier: nn.Module,
        loader: DataLoader[Any] | None,
        planner: Planner | None,
        declared: Declaration,
        client: Client,
        let_go: Callable[[float], None],
        embed_dim: int,
        lookahead: int,
    ) -> None:
        self._declared = declared
        self._client = client
        self._let_go: Callable[[float], None] | None = let_go
        when_collected(self, let_go)
        self._attribution: Attribution[Seen] = Attribution(lookahead)
        self._planner = planner
        self._follower = None
        if loader is not None and planner is not None:
            self._follower = Follower(loader, planner, self._taken)
        self._capture = Capture(model, classifier, embed_dim, self._forward)
        self._batches_taken = 0
        self._ready: _Ready | None = None
        self._warned: set[str] = set()
        self.epoch = 0
        self.step = 0
        # The samples of the last batch that went through the model.
        self.indices: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self.sampler = None if planner is None else planner.sampler
        if loader is not None and self.sampler is not None:
            evaluation = Evaluation(model, classifier, loader, declared.labels, self._capture, self._evaluated)
            self.sampler.offer(evaluation.losses)

    @property
    def counts(self) -> Counter[str]:
        """Batches sent and dropped, and why others were not recorded."""
        return self._client.counts

    def epoch_end(self, accuracy: float | None = None) -> None:
        """Say that an epoch is over; `accuracy` is a share between 0 and 1.

        Raises ValueError for another number.
        """
        if accuracy is not None and not 0 <= float(accuracy) <= 1:
            raise ValueError(f"accuracy={accuracy}: a share between 0 and 1")
        self._release()
        self._look_back()
        share = None if accuracy is None else float(accuracy)
        self._client.epoch_end(EpochEnd(self.epoch, share))
        if self.sampler is not None:
            self.sampler.epoch_end(share)
        self.epoch += 1
        self.step = 0

    def losses(self, losses: Tensor) -> None:
        """Give the per-sample losses of the last batch, in place of the cross-entropy against the declared labels.

        Raises ValueError unless there is one loss for each of its samples.
        """
        self._capture.collect()
        if self._ready is None:
            return
        if losses.shape != self._ready.indices.shape:
            raise ValueError(f"losses of shape {tuple(losses.shape)} for a batch of {len(self._ready.indices)}")
        self._ready = self._ready._replace(losses=to_host(as_float16(losses.detach())))

    def batch(self, indices: npt.ArrayLike | Tensor) -> None:
        """Say which samples the next training forward is about, where no loader is followed."""
        self._taken(self, np.asarray(indices, dtype=np.uint32))

    def weights(self, clip: float | None = None) -> Tensor:
        """Importance weights 1/(N q) of the last batch's samples; ones without a SpiderSampler.

        They lie where the classifier's input lay.
        """
        self._capture.collect()
        if self.sampler is None:
            return torch.ones(len(self.indices), device=self._capture.device)
        return to_device(self.sampler.weights(self.indices, clip), self._capture.device)

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what waits, and leave model and loader as they were."""
        if self._let_go is None:
            return
        self._release()
        self._capture.remove()
        if self._follower is not None:
            self._follower.undo()
        if self._planner is not None:
            self._planner.close()
        self._let_go(timeout_s)
        self._let_go = None

    # -- events of the loop

    def _taken(self, iteration: object, indices: npt.NDArray[np.uint32]) -> None:
        self._release()
        if not self._attribution.is_in(iteration):
            self._look_back()
        self._attribution.taken(iteration, indices)
        self._batches_taken += 1
        if self._batches_taken == _BLIND_BATCHES and not self._capture.seen:
            self._warn("the classifier was not seen in a training forward: attach before the model's first, or name it")

    def _forward(self, rows: int) -> None:
        self._send()
        indices = self._attribution.rows_of(rows)
        if indices is None:
            self.counts["unmatched"] += 1
            return
        whole = self._attribution.forward(rows, self._capture.see(self._declared.labels[indices]))
        if whole is not None:
            self.indices = whole[0]
            self._ready = _Ready(self.epoch, self.step, *whole)
            self.step += 1

    def _evaluated(self, indices: npt.NDArray[np.uint32], seen: Seen) -> None:
        """The daemon learns from an evaluation too, and that these reads of the samples are done."""
        ready = _Ready(self.epoch, self.step, indices, [seen])
        self._client.batch(partial(ready.message, self._declared.name))

    def _release(self) -> None:
        """Send the last batch, once nothing more can be said about it."""
        self._capture.collect()
        self._send()

    def _send(self) -> None:
        ready, self._ready = self._ready, None
        if ready is not None:
            # Nothing of the training hangs on what waits, perhaps for ever, for a daemon that has gone.
            sampler = None if self.sampler is None else weakref.ref(self.sampler)
            self._client.batch(partial(_message, ready, self._declared.name, sampler))

    def _look_back(self) -> None:
        """At the end of an iteration: what became of its batches."""
        counts = self._attribution.counts
        if counts["skipped"] and counts["unmatched"]:
            self._warn(
                "batches were skipped and forwards came without one: does the loop take batches ahead? lookahead=1"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _message(ready: _Ready, name: str, sampler_of: Callable[[], SpiderSampler | None] | None) -> Batch | None:
    """In the thread that sends: the copies from the device may have to be waited for."""
    batch = ready.message(name)
    sampler = None if sampler_of is None else sampler_of()
    if batch is not None and batch.losses is not None and sampler is not None:
        sampler.trained(batch.indices, batch.losses)
    return batch
