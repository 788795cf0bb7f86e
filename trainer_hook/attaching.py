"""The interface for a training script: `attach`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from spiderfs.protocol import DEFAULT_LIMITS
from trainer_hook.connection.client import QUEUE_BATCHES
from trainer_hook.connection.introduce import Job
from trainer_hook.connection.sample_list import Sample
from trainer_hook.hook import Hook, replaced_hooks
from trainer_hook.loader.following import drawing_loader
from trainer_hook.model.capture import find_classifier
from trainer_hook.planning import introduce_loader

EMBED_DIM = 64


# Longer than other functions: it has an argument for each choice of a training, and a paragraph for each of them.
def attach(
    directory: str | os.PathLike[str],
    model: nn.Module,
    loader: DataLoader[Any] | None,
    *,
    samples: Iterable[Sample] | None = None,
    split: str = "train",
    classifier: str | nn.Module | None = None,
    embed_dim: int = EMBED_DIM,
    lookahead: int | None = None,
    socket: str | os.PathLike[str] | None = None,
    client_name: str = "torch",
    queue_batches: int = QUEUE_BATCHES,
    plan: bool = True,
    draw_ahead: bool = False,
    share: bool = False,
    job: str | None = None,
    job_name: str | None = None,
    epoch: int = 0,
    epochs: int | None = None,
    resume: bool = False,
    scores_from: str | None = None,
) -> Hook:
    """Tell the daemon of the spiderfs mount at or above `directory` what this training learns, and what it will read.

    Attach after the model has been wrapped (DistributedDataParallel, torch.compile, `Accelerator.prepare`).

    `samples` has a pair (path, label) for each index of the data set, in order; give it if the data set has neither
    `.samples` nor `.imgs`. Embeddings that are wider than `embed_dim` are projected to so many numbers. `lookahead` is
    the number of further batches that the loop takes before the model sees a batch; give it if that is not 0 and the
    model gets copies of the batches. `plan`, `draw_ahead` and `share` are about plans (`trainer_hook.plan`).

    Each call begins a new training, unless a hook of this process is open. `job` is its id, the same on all ranks;
    without it rank 0 chooses one (`Hook.job`). A training that goes on gives the id that it had, and has its scores
    again; with `resume` it is warned if the mount has none. `scores_from` is the id of another training, from whose
    scores this one starts. `job_name` is for people. `epoch` is the number of the epoch that begins, and `epochs` that
    of all, if it is known: the cache's ratio follows them.

    Without a mount or a daemon this logs one warning, and the training goes on; a later failure of the hook does not
    stop the training either. Raises ValueError for arguments, a model or a loader that can never work.
    """
    if not 1 <= embed_dim <= DEFAULT_LIMITS.dimension:
        raise ValueError(f"embed_dim={embed_dim}: give 1 to {DEFAULT_LIMITS.dimension}")
    if lookahead is not None and lookahead < 0:
        raise ValueError(f"lookahead={lookahead}: give 0 or more")
    if queue_batches < 1:
        raise ValueError(f"queue_batches={queue_batches}: give 1 or more")
    if epoch is None:
        raise ValueError("epoch=None: give the number of the epoch that begins, 0 for a new training")
    layer = find_classifier(model, classifier)
    drawing = None if loader is None else drawing_loader(loader)
    replaced = replaced_hooks(layer, drawing, split, job)
    introduced = introduce_loader(
        directory,
        loader,
        share,
        check=not any(hook.follows(drawing) for hook in replaced),
        samples=samples,
        split=split,
        socket=socket,
        client_name=client_name,
        job=Job(job, job_name, epoch, epochs, resume, scores_from),
        queue_batches=queue_batches,
    )
    for hook in replaced:
        hook.close()
    plans = {"publish": plan, "draw_ahead": draw_ahead, "share": share}
    return Hook(model, layer, loader, introduced, plans, embed_dim, lookahead, epoch)
