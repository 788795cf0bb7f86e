"""The callback in trainings by Hugging Face's own Trainer, on a CPU and without a network."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from hook_daemon import HookDaemon, until
from mounting import eventually, mounted
from pictures import EPOCHS, PICTURES, Classifier, Pictures, make_pictures
from tiny_training import SIZE, Network, Numbered, loader, recorded, samples_of, train_epoch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from trainer_hook import InfoBatchSampler, attach, hugging_face_callback, plan

BATCHES = 7  # of 50 samples in eights


class Model(nn.Module):
    """Answers as the Trainer's own models do."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.network(inputs)
        if labels is None:
            return {"logits": scores}
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def collated(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {"inputs": torch.stack([row for row, _ in rows]), "labels": torch.tensor([label for _, label in rows])}


def share_right(told: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(told.predictions, 1) == told.label_ids).mean())}


def trainer(
    directory: Path,
    callback: Any,
    dataset: Dataset[Any] | None = None,
    network: nn.Module | None = None,
    kind: type[transformers.Trainer] = transformers.Trainer,
    **options: Any,
) -> transformers.Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(directory / "output"),
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 8,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    dataset = dataset or Numbered()
    return kind(
        Model(network or Network()),
        transformers.TrainingArguments(**settings | options),
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=collated,
        compute_metrics=share_right,
        callbacks=[callback],
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {"dataloader_drop_last": False, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
        {"bf16": True},
    ],
)
def test_every_sample_is_recorded_as_itself(daemon: HookDaemon, options: dict[str, Any]) -> None:
    callback = hugging_face_callback(daemon.mount)
    trainer(daemon.mount, callback, **options).train()
    assert sorted(recorded(daemon, EPOCHS * BATCHES, 8e-3)) == sorted([*range(SIZE)] * EPOCHS)
    until(lambda: len(daemon.sink.ends) == EPOCHS)
    assert daemon.sink.ends[-1][1].accuracy is not None
    assert daemon.sink.lists[0][0].hello.client == "transformers"
    assert callback.attachment.hook is None


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3}])
def test_losses_are_weighted(daemon: HookDaemon, options: dict[str, Any]) -> None:
    """A step has the gradient of the mean of weight times loss, and an evaluation that of no weights."""
    callback = hugging_face_callback(daemon.mount)
    pruned: list[int] = []

    class Pruned(transformers.Trainer):  # type: ignore[misc]
        sampler = InfoBatchSampler(SIZE, epochs=100)

        def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> InfoBatchSampler:
            return self.sampler

    def checked(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        found = callback.weighted_loss(outputs, labels, num_items_in_batch)
        losses = nn.functional.cross_entropy(outputs["logits"], labels, reduction="none")
        if torch.is_grad_enabled():
            weights = Pruned.sampler.weights(callback.attachment.hook.indices)
            pruned.append(int((weights == 2).sum()))
            losses = losses * weights
        count = len(labels) if num_items_in_batch is None else num_items_in_batch
        assert float(found.detach()) == pytest.approx(float(losses.detach().sum() / count), rel=1e-5)
        return found  # type: ignore[no-any-return]

    training = trainer(daemon.mount, callback, kind=Pruned, num_train_epochs=4, **options)
    training.compute_loss_func = checked
    training.train()
    assert sum(pruned[:BATCHES]) == 0
    assert sum(pruned[BATCHES:]) > 10
    assert training.evaluate()["eval_loss"] > 0


class Noting(Numbered):
    """Notes which samples are read; with loader workers nothing, for they have copies."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return super().__getitem__(index)


class Heard(transformers.TrainerCallback):  # type: ignore[misc]
    """Goes on after each step only when the daemon has been told of the plan.

    A plan that has not been sent when the next epoch begins is not sent any more, and a rest may have one batch.
    """

    def __init__(self, daemon: HookDaemon) -> None:
        self._daemon = daemon

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        until(lambda: bool(self._daemon.sink.plans))


@pytest.mark.parametrize(("saved_after", "workers"), [(BATCHES, 0), (4, 2), (4, 0), (6, 2)])
def test_a_training_that_resumes(daemon: HookDaemon, saved_after: int, workers: int) -> None:
    saving = {"save_strategy": "steps", "save_steps": saved_after, "max_steps": saved_after, "eval_strategy": "no"}
    data = Noting()
    trainer(daemon.mount, hugging_face_callback(daemon.mount), data, **saving).train()
    before = recorded(daemon, saved_after)
    daemon.sink.batches.clear()
    daemon.sink.plans.clear()
    data.read.clear()
    options: dict[str, Any] = {"num_train_epochs": 3, "eval_strategy": "no", "dataloader_num_workers": workers}
    second = trainer(daemon.mount, hugging_face_callback(daemon.mount), data, **options)
    second.add_callback(Heard(daemon))
    second.train(resume_from_checkpoint=str(daemon.mount / "output" / f"checkpoint-{saved_after}"))
    assert second.state.global_step == 3 * BATCHES
    # Without loader workers, the first batch of the rest is given before the hook can see who asks for it.
    unseen = min(8, SIZE - 8 * saved_after) if saved_after % BATCHES and not workers else 0
    seen = 3 * BATCHES - saved_after - (unseen > 0)
    if not workers:
        assert sorted(before + data.read) == sorted([*range(SIZE)] * 3)
        assert recorded(daemon, seen) == data.read[unseen:]
    else:
        assert sorted(before + recorded(daemon, seen)) == sorted([*range(SIZE)] * 3)
    hello = daemon.sink.lists[-1][0].hello
    assert (hello.epoch, hello.epochs) == (saved_after // BATCHES, 3)
    assert {batch.epoch for _, batch in daemon.sink.batches} <= {0, 1, 2}
    if saved_after % BATCHES:
        until(lambda: any(told.taken == SIZE for _, told in daemon.sink.progress if told.epoch == 0))
        order = next(one.order.tolist() for _, one in daemon.sink.plans if one.begun)
        assert order[: 8 * saved_after] == before


@pytest.mark.parametrize(("prepared", "workers"), [(False, 2), (True, 0)])
def test_batches_that_accelerate_skips(daemon: HookDaemon, prepared: bool, workers: int) -> None:
    accelerator, loading = Accelerator(cpu=True), {"num_workers": workers, "multiprocessing_context": "fork"}
    batches = loader(generator=torch.Generator().manual_seed(7), **loading if workers else {})
    model = Network()
    alone = loader(generator=torch.Generator().manual_seed(7))
    expected = [index for rows, _ in alone for index in samples_of(rows)]
    if prepared:
        model, batches = accelerator.prepare(model, batches)
    hook = attach(daemon.mount, model, batches)
    train_epoch(model, accelerator.skip_first_batches(batches, 3))
    hook.epoch_end()
    unseen = 0 if workers else 1
    assert recorded(daemon, BATCHES - 3 - unseen) == expected[8 * (3 + unseen) :]
    train_epoch(model, batches)
    hook.close()
    assert sorted(recorded(daemon, 2 * BATCHES - 3 - unseen)[-SIZE:]) == [*range(SIZE)]


def test_a_sampler_without_a_length_trains_for_so_many_steps(daemon: HookDaemon) -> None:
    class Unending(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return itertools.cycle(range(SIZE))

    class Stepping(transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Unending:
            return Unending()

    options = {"max_steps": 3, "eval_strategy": "no"}
    trainer(daemon.mount, hugging_face_callback(daemon.mount), kind=Stepping, **options).train()
    assert recorded(daemon, 3) == [*range(3 * 8)]
    assert daemon.sink.lists[0][0].hello.epochs is None


def test_a_training_that_failed_can_be_begun_again(daemon: HookDaemon) -> None:
    class Failing(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("no more")

    failing = Failing()
    twice = trainer(daemon.mount, hugging_face_callback(daemon.mount))
    twice.add_callback(failing)
    with pytest.raises(RuntimeError, match="no more"):
        twice.train()
    twice.remove_callback(failing)
    until(lambda: len(daemon.sink.batches) == 2)
    daemon.sink.batches.clear()
    twice.train()
    # The batch that failed is sent when its hook ends.
    assert len(recorded(daemon, EPOCHS * BATCHES + 1)) == EPOCHS * SIZE + 8


@pytest.mark.parametrize("share", [False, True])
def test_the_state_of_a_prepared_loader_has_what_the_loop_has_taken(daemon: HookDaemon, share: bool) -> None:
    with plan(daemon.mount, batches := Accelerator(cpu=True).prepare(loader()), share=share) as planning:
        taken = [len(batch[0]) for batch in itertools.islice(batches, 3)]
        assert planning.state_dict()["consumed"] == sum(taken)
        planning.load_state_dict(planning.state_dict())
        assert sum(len(batch[0]) for batch in batches) == SIZE - sum(taken)


@pytest.mark.opened_and_immutable
@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_its_samples_and_there_is_no_other(tmp_path: Path, workers: int) -> None:
    make_pictures(tmp_path / "source")
    with mounted(tmp_path / "source", tmp_path / "m") as mount:
        pictures = Pictures(mount.point / "train")
        callback = hugging_face_callback(mount.point)
        loading: dict[str, Any] = {"eval_strategy": "no", "dataloader_num_workers": workers}
        trainer(tmp_path, callback, pictures, Classifier(), **loading).train()

        def samples() -> list[tuple[int, int]]:
            rows = map(json.loads, mount.control("epochs").read_text().splitlines())
            return [(row["epoch"], row["samples"]) for row in rows]

        eventually(lambda: not mount.stats()["trainers"], what="the end of the training")
        assert samples() == [(epoch, PICTURES) for epoch in range(EPOCHS)]
