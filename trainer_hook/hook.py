"""The interface for a training script: `attach` returns a hook, which publishes embeddings and losses to the daemon."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from spiderfs.protocol import DEFAULT_LIMITS, Batch, EpochEnd
from trainer_hook.connection.client import QUEUE_BATCHES
from trainer_hook.connection.introduce import Introduced, Job, end_with
from trainer_hook.connection.sample_list import Sample
from trainer_hook.isolation import ErrorBoundary
from trainer_hook.loader.accelerate import drawing_loader
from trainer_hook.model.attribution import AttributedPass, Attribution, Indices, LabelCheck
from trainer_hook.model.capture import Capture, Evaluation, Seen, as_float16, find_classifier, to_device, to_host
from trainer_hook.model.provenance import Shown
from trainer_hook.planning import Planning, introduce_loader
from trainer_hook.ranges.sample_ranges import SampleRanges
from trainer_hook.samplers.epoch import EpochSampler


@dataclass(frozen=True, kw_only=True)
class HookOptions:
    """Further settings of `attach`. Raises ValueError for a value that can never work."""

    classifier: str | nn.Module | None = None
    """The layer whose input is the embedding, or its name; the default is the model's last linear layer."""
    embed_dim: int = 64
    """Embeddings that are wider than this are projected to this many numbers."""
    embeddings: Literal["unit", "raw"] = "unit"
    """Whether embeddings are scaled to length 1; a mount with `embeddings=raw` needs `raw`."""
    ranges: SampleRanges | Iterable[Any] | Literal["learn"] | None = None
    """See `trainer_hook.plan`. With ranges no embeddings or losses are sent: there are no scores for parts of files."""
    lookahead: int | None = None
    """The number of further batches that the loop takes before the model sees a batch.

    Give it if that is not 0 and the model gets copies of the batches.
    """
    draw_ahead: bool = False
    """See `trainer_hook.plan`."""
    job_name: str | None = None
    """A name of the training run for people."""
    epochs: int | None = None
    """The number of epochs of the training, if it is known: the cache's ratio follows it."""
    resume: bool = False
    """Whether to warn if the mount has no scores of `job`, the run that resumes."""
    scores_from: str | None = None
    """The job ID of another run, from whose scores this one starts."""
    socket: str | os.PathLike[str] | None = None
    """The path of the daemon's socket, where it is not the one that the mount names: in a container."""
    client_name: str | None = None
    """The library that runs the training loop; the default is torch."""
    queue_batches: int = QUEUE_BATCHES
    """The number of batches that may wait for the daemon; further ones are dropped."""

    def __post_init__(self) -> None:
        if not 1 <= self.embed_dim <= DEFAULT_LIMITS.dimension:
            raise ValueError(f"embed_dim={self.embed_dim}: give 1 to {DEFAULT_LIMITS.dimension}")
        if self.embeddings not in ("unit", "raw"):
            raise ValueError(f"embeddings={self.embeddings!r}: give 'unit' or 'raw'")
        if self.lookahead is not None and self.lookahead < 0:
            raise ValueError(f"lookahead={self.lookahead}: give 0 or more")
        if self.queue_batches < 1:
            raise ValueError(f"queue_batches={self.queue_batches}: give 1 or more")


def attach(
    directory: str | os.PathLike[str],
    model: nn.Module,
    loader: DataLoader[Any] | None,
    *,
    samples: Iterable[Sample] | None = None,
    split: str = "train",
    plan: bool = True,
    share: bool = False,
    job: str | None = None,
    epoch: int = 0,
    options: HookOptions | None = None,
) -> Hook:
    """Publish embeddings, losses and plans of this training run to the spiderfs mount at or above `directory`.

    Attach after the model has been wrapped (DistributedDataParallel, torch.compile, `Accelerator.prepare`).

    `samples` has a pair (path, label) for each index of the data set, in order; give it if the data set has neither
    `.samples` nor `.imgs`. `plan` and `share` are about plans (`trainer_hook.plan`). `options` has what few scripts
    need.

    Each call begins a new training, unless a hook of this process is open. `job` is its id, the same on all ranks;
    without it rank 0 chooses one (`Hook.job`). A training that goes on gives the id that it had, and has its scores
    again. `epoch` is the number of the epoch that begins.

    Without a mount or a daemon this logs one warning, and the training goes on; a later failure of the hook does not
    stop the training either. Raises ValueError for arguments, a model or a loader that can never work.
    """
    options = options or HookOptions()
    if epoch is None:
        raise ValueError("epoch=None: give the number of the epoch that begins, 0 for a new training")
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}, no torch module: give directory, model, then loader")
    layer = find_classifier(model, options.classifier)
    drawing = None if loader is None else drawing_loader(loader)
    # Hooks of the same layer whose loader has been freed; and if the training attaches again by its job's id, those of
    # its list that have its loader or have seen batches: loaders used side by side are attached before the first batch.
    replaced = [hook for hook in _open if hook._is_replaced(layer, drawing, split, job)]
    introduced = introduce_loader(
        directory,
        loader,
        share,
        check=not any(hook.follows(drawing) for hook in replaced),
        samples=samples,
        ranges=options.ranges,
        split=split,
        socket=options.socket,
        client_name=options.client_name or "torch",
        job=Job(job, options.job_name, epoch, options.epochs, options.resume, options.scores_from),
        queue_batches=options.queue_batches,
    )
    for hook in replaced:
        hook.close()
    plans = {"publish": plan, "draw_ahead": options.draw_ahead, "share": share}
    return Hook(model, layer, loader, introduced, plans, options, epoch)


log = logging.getLogger("trainer_hook")

# If the classifier did not run in training during this many batches, the hook says so.
_BLIND_BATCHES = 50


# The attributions of each classifier: a forward pass may be of a batch of any loader.
_attributions: WeakKeyDictionary[nn.Module, WeakSet[Attribution]] = WeakKeyDictionary()
_open: WeakSet[Hook] = WeakSet()


class Hook:
    """The hook of one training run. Only the training's thread may call its methods; none of them waits or raises.

    Values that cannot be used are left out, with one warning. If the hook itself fails, it logs that and does nothing
    from then on.
    """

    def __init__(
        self,
        model: nn.Module,
        classifier: nn.Module,
        loader: DataLoader[Any] | None,
        introduced: Introduced,
        plans: dict[str, bool],
        options: HookOptions,
        epoch: int,
    ) -> None:
        """`plans` are arguments of `Planning`, for a hook with a loader."""
        self._declared, self._client = introduced.declaration, introduced.connection.client
        self._job = introduced.connection.hello.job
        self._boundary = ErrorBoundary()
        self._boundary.on_failure(self._leave)
        # Without a loader, `Hook.batch` names the samples of the very next forward pass.
        ahead = 0 if loader is None and options.lookahead is None else options.lookahead
        beside = _attributions.setdefault(classifier, WeakSet())
        self._attribution: Attribution = Attribution(ahead, self.counts, beside)
        beside.add(self._attribution)
        self._planning: Planning | None = None
        self._end_plans: Callable[[float], None] | None = introduced.release
        if loader is None:
            end_with(self, introduced)
        else:
            self._planning = Planning(loader, introduced, self._boundary, first_epoch=epoch, listener=self, **plans)
            self._end_plans = self._planning.close
        raw = options.embeddings == "raw"
        self._capture = Capture(model, classifier, options.embed_dim, self._boundary, self._forward, raw)
        _open.add(self)
        self._labels = LabelCheck(self._declared.labels)
        self._batches_taken = 0
        self._thread = threading.get_ident()
        self._warned: set[str] = set()
        self._unmatched_said = 0
        self._epoch = epoch
        self.step = 0
        # The last forward pass of the training: how many rows it had, and its samples if they are known.
        self._rows = 0
        self._latest: AttributedPass | None = None
        self.sampler = None if self._planning is None else self._planning.planner.sampler
        if loader is not None and self.sampler is not None:
            inner = drawing_loader(loader)
            evaluation = Evaluation(model, classifier, inner, self._declared.targets, self._capture, self._evaluated)
            self.sampler.offer(evaluation.losses)

    @property
    def job(self) -> str:
        """The job ID; `attach` takes it as `job=` when the run resumes."""
        return self._job

    @property
    def epoch(self) -> int:
        """The number of the current or next epoch; `attach` takes it as `epoch=`."""
        return self._epoch

    @property
    def counts(self) -> Counter[str]:
        """The numbers of batches that were sent, dropped, or not sent for other reasons."""
        return self._client.counts

    @property
    def indices(self) -> Indices:
        """The samples of the last forward pass; empty if they are not known."""
        return np.empty(0, np.uint32) if self._latest is None else self._latest.samples

    def state_dict(self, done: bool = True) -> dict[str, Any]:
        """Where the epoch of the job is; see `Planning.state_dict`."""
        return {} if self._planning is None else self._planning.state_dict(done)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next epoch of the loader go on after what had been taken; see `Planning.load_state_dict`."""
        if self._planning is not None:
            self._planning.load_state_dict(state)

    @property
    def batches_left(self) -> int | None:
        """How many batches this rank reads of an epoch that is about to go on; None if none is."""
        return None if self._planning is None else self._planning.planner.batches_left

    def epoch_end(self, accuracy: float | None = None) -> None:
        """End an epoch; `accuracy` is a share between 0 and 1, and other numbers are ignored."""
        self._boundary.call(self._end_epoch, accuracy)

    def end_of_batches(self) -> None:
        """The training takes no more batches of the epoch, whose end comes later. Only callbacks call this."""
        if self._planning is not None:
            self._boundary.call(self._planning.planner.epoch_over)

    def losses(self, losses: Tensor) -> None:
        """Use these losses for the last forward pass, one for each of its samples; others are ignored.

        They replace the cross-entropy against the declared labels.
        """
        self._boundary.call(self._replace_losses, losses)

    def batch(self, indices: npt.ArrayLike | Tensor) -> None:
        """Declare the samples of the next forward pass; only for a hook without a loader."""
        self._boundary.call(lambda: self.taken(self, np.atleast_1d(np.asarray(indices, dtype=np.uint32)), None))

    def weights(self, clip: float | None = None) -> Tensor:
        """The importance weights of the last forward pass, on the classifier's device.

        They are 1/(N q) with a SpiderSampler, and those of InfoBatch with an InfoBatchSampler. With other samplers, or
        if the samples are not known, all weights are 1.
        """
        weights = self._boundary.call(self._weights, clip)
        return torch.ones(self._rows, device=self._capture.device) if weights is None else weights

    def close(self, timeout_s: float = 2.0) -> None:
        """Send the queued messages, and restore model and loader."""
        if self._end_plans is not None:
            self._boundary.call(self._send_known)
            self._leave(timeout_s)

    # -- events of the loop

    def taken(self, iteration: object, indices: Indices, batch: Any) -> None:
        """The loop has taken a batch. Only the follower calls this, through the boundary."""
        self._collect()
        known = bool(len(indices)) and int(indices.max()) < len(self._declared.paths)
        if not known and self._declared.grid is None:
            self._warn("the loader reads samples that the list does not have: give samples=, one for each index")
        if known:
            doubt = self._labels.doubt(indices, batch)
            known = doubt is None
            if doubt:
                self._warn(doubt)
        self._attribution.taken(iteration, indices if known else indices[:0], batch)
        self._send_ready()
        self._batches_taken += 1
        if self._batches_taken == _BLIND_BATCHES and not self._capture.seen:
            self._warn(
                "the classifier has not run in training: attach to the model that is trained, and to no copy or trace "
                "of it, or name another layer by HookOptions(classifier=)"
            )

    def over(self, iteration: object) -> None:
        """An iteration gives no more batches. Only the follower calls this, through the boundary."""
        self._collect()
        self._attribution.over(iteration)

    def _collect(self) -> None:
        # If another thread takes batches, a forward pass may be running now.
        if threading.get_ident() == self._thread:
            self._capture.collect()

    def follows(self, loader: DataLoader[Any] | None) -> bool:
        """Whether this hook has this loader, which draws batches."""
        return self._planning is not None and loader is not None and self._planning.follower.loader() is loader

    def _is_replaced(self, classifier: nn.Module, loader: DataLoader[Any] | None, split: str, job: str | None) -> bool:
        if self._attribution not in _attributions.get(classifier, ()):
            return False
        if self._planning is not None and self._planning.follower.loader() is None:
            return True
        is_same = (self._job, self._declared.split) == (job, split)
        return is_same and (self._batches_taken > 0 or self.follows(loader))

    def copied(self, batch: Any) -> None:
        """The training is about to use `batch`, a copy of the batch that was taken last. Only callbacks call this."""
        self._boundary.call(self._attribution.add_tensors, batch)

    def _forward(self, shown: Shown) -> None:
        self._rows = shown.shape[0]
        self._latest = found = self._attribution.find(shown)
        if found is None:
            return
        if not found.inputs:
            self._send_ready(but=found)
        if len(found.new_rows):
            targets = self._declared.targets
            labels = None if targets is None else targets[found.samples[found.new_rows]]
            self._attribution.record(found, self._capture.see(found.new_rows, labels))

    def _end_epoch(self, accuracy: float | None) -> None:
        self._send_known()
        try:
            share = None if accuracy is None else float(accuracy)
        except (TypeError, ValueError, RuntimeError):
            share = math.nan
        if share is not None and not 0 <= share <= 1:
            self._warn(f"accuracy={accuracy} is left out: give a share between 0 and 1")
            share = None
        unmatched = self.counts["unmatched"]
        self._client.epoch_end(EpochEnd(self._epoch, share, unmatched - self._unmatched_said))
        self._unmatched_said = unmatched
        if self._planning is not None:
            self._planning.planner.epoch_over()
        if self.sampler is not None:
            self.sampler.epoch_end(share)
        self._epoch += 1
        self.step = 0

    def _replace_losses(self, losses: Tensor) -> None:
        self._capture.collect()
        found = self._latest
        if found is None or found.part is None:
            return
        if losses.shape != found.samples.shape:
            self._warn(f"losses of shape {tuple(losses.shape)} for {len(found.samples)} samples are left out")
            return
        kept = losses.detach()
        if len(found.new_rows) < len(found.samples):
            kept = kept[to_device(torch.from_numpy(found.new_rows), kept.device)]
        found.part = found.part._replace(losses=to_host(as_float16(kept)))

    def _weights(self, clip: float | None) -> Tensor | None:
        self._capture.collect()
        if self.sampler is None or self._latest is None:
            return None
        return to_device(self.sampler.weights(self._latest.samples, clip), self._capture.device)

    def _evaluated(self, indices: Indices, seen: Seen) -> None:
        """Send the batch of an evaluation: the daemon learns from it, and learns that these reads have arrived."""
        self._client.batch(partial(_message, self._declared.name, self._epoch, self.step, indices, [seen]))

    def _send_known(self) -> None:
        """Send all batches that are known, because no further forward pass comes before the next batch."""
        self._capture.collect()
        self._attribution.close_window()
        self._send_ready()

    def _send_ready(self, but: AttributedPass | None = None) -> None:
        for batch in self._attribution.ready(but):
            parts = [found.part for found in batch if found.part is not None]
            indices = np.concatenate([found.samples[found.new_rows] for found in batch])
            # A weak reference: the message may wait for ever for a dead daemon, and must not keep the sampler alive.
            sampler = None if self.sampler is None else weakref.ref(self.sampler)
            self._client.batch(partial(_message, self._declared.name, self._epoch, self.step, indices, parts, sampler))
            self.step += 1
        for reason in self._attribution.reasons:
            self._warn(f"some batches are not sent to the daemon: {reason}")

    def _leave(self, timeout_s: float) -> None:
        end_plans, self._end_plans = self._end_plans, None
        if end_plans is None:
            return
        self._capture.remove()
        _open.discard(self)
        for attributions in _attributions.values():
            attributions.discard(self._attribution)
        end_plans(timeout_s)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _message(
    name: str,
    epoch: int,
    step: int,
    indices: Indices,
    parts: list[Seen],
    sampler_of: Callable[[], EpochSampler | None] | None = None,
) -> Batch | None:
    """The embeddings and losses of samples of one batch, for the daemon; the sampler gets the losses too.

    None if a number is not finite, because such a step learned the model nothing. For the sending thread: copies from
    the device may not be complete.
    """
    embeddings = np.concatenate([part.embeddings() for part in parts])
    losses: npt.NDArray[Any] | None = None
    if all(part.losses is not None for part in parts):
        losses = np.concatenate([part.losses() for part in parts if part.losses is not None])
    if not np.isfinite(embeddings).all() or (losses is not None and not np.isfinite(losses).all()):
        return None
    sampler = None if sampler_of is None else sampler_of()
    if losses is not None and sampler is not None:
        sampler.trained(indices, losses)
    return Batch(name, epoch, step, indices, embeddings, losses)
