"""The callback in trainings by Lightning's own Trainer, on a CPU and without a network."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import torch
from hook_daemon import HookDaemon, until
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from mounting import mounted
from pictures import EPOCHS, PICTURES, Classifier, Pictures, check_recorded, make_pictures
from tiny_training import SIZE, WORKERS, Network, Numbered, loader, recorded, samples_of
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from trainer_hook import ImpactSampler, InfoBatchSampler, SpiderSampler, lightning_callback, plan

BATCHES = 7  # of 50 samples in eights
STAYING = {"persistent_workers": True, **WORKERS}

# Advice of Lightning's on how to train faster, which a test of 7 batches does not need.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # Of torch's, about how Lightning calls it.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
]


class Module(lightning.pytorch.LightningModule):
    """Trains a network; `directly` past its own forward, as many do, but for evaluation."""

    def __init__(self, network: nn.Module, directly: bool = False, planned_rate: bool = False) -> None:
        super().__init__()
        self.network = network
        self.directly = directly
        self.planned_rate = planned_rate

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores = self.network(batch[0]) if self.directly else self(batch[0])
        return nn.functional.cross_entropy(scores, batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("val_acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.planned_rate:
            return optimizer
        # This asks for the loader before anything else does.
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


def trainer(directory: Path, callback: Any, **options: Any) -> lightning.pytorch.Trainer:
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": directory,
        "callbacks": [callback],
    }
    return lightning.pytorch.Trainer(**settings | options)


@pytest.mark.parametrize(
    ("module", "loading", "options"),
    [
        ({}, {}, {}),
        ({"directly": True}, {}, {}),
        ({"planned_rate": True}, {}, {}),
        ({}, STAYING, {}),
        ({}, {}, {"accumulate_grad_batches": 3}),
        ({}, {}, {"reload_dataloaders_every_n_epochs": 1}),
        ({}, {}, {"val_check_interval": 2}),
    ],
)
def test_every_sample_is_recorded_as_itself(
    daemon: HookDaemon, module: dict[str, Any], loading: dict[str, Any], options: dict[str, Any]
) -> None:
    callback = lightning_callback(daemon.mount)
    model, held_out = Module(Network(), **module), loader(shuffle=False)
    trainer(daemon.mount, callback, **options).fit(model, loader(**loading), held_out)
    assert sorted(recorded(daemon, EPOCHS * BATCHES)) == sorted([*range(SIZE)] * EPOCHS)
    until(lambda: len(daemon.sink.ends) == EPOCHS)
    assert all(end.accuracy is not None for _, end in daemon.sink.ends)
    hellos = [trainer.hello for trainer, _ in daemon.sink.lists]
    assert {(hello.client, hello.epochs) for hello in hellos} == {("lightning", EPOCHS)}
    assert len({hello.job for hello in hellos}) == 1, "a loader that is made again does not begin another job"
    assert {(batch.epoch, step) for step, (_, batch) in enumerate(daemon.sink.batches)} == {
        (step // BATCHES, step) for step in range(EPOCHS * BATCHES)
    }
    assert callback.attachment.hook is None
    gc.collect()


def test_plans_are_what_the_training_reads(daemon: HookDaemon) -> None:
    trainer(daemon.mount, lightning_callback(daemon.mount)).fit(Module(Network()), loader(), loader(shuffle=False))
    read = recorded(daemon, EPOCHS * BATCHES)
    plans = [plan.order.tolist() for _, plan in daemon.sink.plans if plan.begun and len(plan.order)]
    assert plans == [read[first : first + SIZE] for first in range(0, EPOCHS * SIZE, SIZE)]


class Epochs(lightning.pytorch.Callback):
    """Notes the number of each epoch that begins, as the Trainer has it and as the hook has it."""

    def __init__(self, attachment: Any) -> None:
        self.attachment = attachment
        self.begun: list[tuple[int, int]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.begun.append((trainer.current_epoch, self.attachment.hook.epoch))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
@pytest.mark.parametrize(
    "saving",
    [
        {"save_on_train_epoch_end": False},
        {"every_n_train_steps": BATCHES + 3},
        *(
            pytest.param(saving, marks=pytest.mark.thorough)
            for saving in ({"save_on_train_epoch_end": True}, {"every_n_train_steps": BATCHES})
        ),
    ],
)
def test_a_training_that_resumes_from_any_checkpoint_counts_epochs_as_it_does(
    daemon: HookDaemon, saving: dict[str, Any]
) -> None:
    """A checkpoint may have been written before its epoch was over to the last."""
    saver = ModelCheckpoint(daemon.mount / "saved", save_top_k=-1, **saving)
    callback = lightning_callback(daemon.mount)
    first = trainer(daemon.mount, callback, callbacks=[callback, saver], max_epochs=2, enable_checkpointing=True)
    first.fit(Module(Network()), loader(), loader(shuffle=False))
    epochs = Epochs(callback.attachment)
    for checkpoint in sorted((daemon.mount / "saved").glob("*.ckpt")):
        second = trainer(daemon.mount, callback, callbacks=[callback, epochs], max_epochs=4)
        second.fit(Module(Network()), loader(), loader(shuffle=False), ckpt_path=checkpoint, weights_only=False)
    assert {number for number, _ in epochs.begun} >= {2, 3}
    assert all(number == ours for number, ours in epochs.begun), epochs.begun


class Read(Module):
    """Notes which samples each step has."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(Network())
        self.read: list[list[int]] = []
        self.fails_at = fails_at

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(self.read) == self.fails_at:
            raise RuntimeError("no more")
        self.read.append(samples_of(batch[0]))
        return super().training_step(batch)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
@pytest.mark.parametrize(
    ("after", "sampler", "options"),
    [
        (4, SpiderSampler, STAYING),
        (4, None, {"drop_last": True}),
        pytest.param(1, None, {}, marks=pytest.mark.thorough),
        pytest.param(BATCHES, SpiderSampler, {}, marks=pytest.mark.thorough),
        pytest.param(BATCHES + 3, None, STAYING, marks=pytest.mark.thorough),
    ],
)
def test_a_training_goes_on_in_the_middle_of_its_epoch(
    daemon: HookDaemon, after: int, sampler: Any, options: dict[str, Any]
) -> None:
    """From a checkpoint of Lightning's own, and its progress and evaluations are those of a training that went on."""
    drawn = {} if sampler is None else {"sampler": sampler(SIZE, seed=1), "shuffle": False}
    full = SIZE // 8 * 8 if "drop_last" in options else SIZE
    saver = ModelCheckpoint(daemon.mount / "saved", save_top_k=-1, every_n_train_steps=after)
    callback, first = lightning_callback(daemon.mount), Read()
    settings: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True}
    fit = trainer(daemon.mount, callback, callbacks=[callback, saver], **settings)
    fit.fit(first, loader(**options, **drawn), loader(shuffle=False))
    checkpoint = next(path for path in (daemon.mount / "saved").iterdir() if path.name.endswith(f"step={after}.ckpt"))
    callback, second = lightning_callback(daemon.mount), Read()
    drawn = {} if sampler is None else {"sampler": sampler(SIZE, seed=1), "shuffle": False}
    again = trainer(daemon.mount, callback, max_epochs=3)
    again.fit(second, loader(**options, **drawn), loader(shuffle=False), ckpt_path=checkpoint, weights_only=False)
    read = [*itertools.chain(*first.read[:after], *second.read)]
    epochs = [read[begun : begun + full] for begun in range(0, 3 * full, full)]
    assert [sorted(epoch) == [*range(SIZE)] or len(set(epoch)) == full for epoch in epochs] == [True] * 3
    assert len(first.read[:after]) + len(second.read) == 3 * -(-full // 8) == again.global_step
    until(lambda: sum(end.accuracy is not None for _, end in daemon.sink.ends) == len(daemon.sink.ends) >= 4)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
@pytest.mark.parametrize(("after", "sampled"), [(2, False), (3, True), (5, True), (6, False)])
def test_an_epoch_is_over_when_the_trainer_takes_no_more_of_it(daemon: HookDaemon, after: int, sampled: bool) -> None:
    """With `limit_train_batches`, and a checkpoint at an epoch's last batch, or within it."""

    def batches() -> Any:
        return loader(sampler=SpiderSampler(SIZE, seed=1), shuffle=False) if sampled else loader()

    saver = ModelCheckpoint(daemon.mount / "saved", save_top_k=-1, every_n_train_steps=after)
    callback, first = lightning_callback(daemon.mount), Read()
    settings: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 3}
    fit = trainer(daemon.mount, callback, callbacks=[callback, saver], enable_checkpointing=True, **settings)
    fit.fit(first, batches(), loader(shuffle=False))
    checkpoint = next(path for path in (daemon.mount / "saved").iterdir() if path.name.endswith(f"step={after}.ckpt"))
    daemon.sink.plans.clear()
    again, second = trainer(daemon.mount, lightning_callback(daemon.mount), **settings), Read()
    again.fit(second, batches(), loader(shuffle=False), ckpt_path=checkpoint, weights_only=False)
    assert len(second.read) == 9 - after
    assert again.global_step == 9
    assert again.current_epoch == 3
    behind = first.read[after // 3 * 3 : after]
    epoch = [*behind, *second.read[: 3 - len(behind)]]
    assert len({*itertools.chain(*epoch)}) == 24
    if not behind:
        until(lambda: any(one.begun and len(one.order) for _, one in daemon.sink.plans))
        assert all(len(one.order) in (0, SIZE) for _, one in daemon.sink.plans), "whole epochs"
    if sampled:
        assert second.read[-3:] == first.read[-3:], "the draws follow from the number of the epoch"


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=.*:UserWarning")
@pytest.mark.parametrize("first", [True, False])
def test_a_batch_at_which_a_training_failed_is_read_again(daemon: HookDaemon, first: bool) -> None:
    callback, saver = lightning_callback(daemon.mount), OnExceptionCheckpoint(daemon.mount)
    callbacks = [callback, saver] if first else [saver, callback]
    failing, again = Read(fails_at=3), Read()
    with pytest.raises(RuntimeError, match="no more"):
        trainer(daemon.mount, callback, callbacks=callbacks, enable_checkpointing=True).fit(
            failing, loader(), loader(shuffle=False)
        )
    saved = daemon.mount / "on_exception.ckpt"
    resumed = trainer(daemon.mount, lightning_callback(daemon.mount), max_epochs=1)
    resumed.fit(again, loader(), loader(shuffle=False), ckpt_path=saved, weights_only=False)
    assert sorted(itertools.chain(*failing.read, *again.read)) == [*range(SIZE)]
    assert len(failing.read) == 3


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`", "ignore:You're resuming from a checkpoint")
def test_a_checkpoint_of_another_list_begins_its_epoch_again(
    daemon: HookDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    saver = ModelCheckpoint(daemon.mount / "saved", save_top_k=-1, every_n_train_steps=4)
    callback = lightning_callback(daemon.mount)
    fit = trainer(daemon.mount, callback, callbacks=[callback, saver], max_epochs=1, enable_checkpointing=True)
    fit.fit(Read(), loader(), loader(shuffle=False))
    (checkpoint,) = (daemon.mount / "saved").iterdir()
    again = trainer(daemon.mount, lightning_callback(daemon.mount), max_epochs=1)
    again.fit(Read(), loader(Numbered(40)), loader(shuffle=False), ckpt_path=checkpoint, weights_only=False)
    assert "begins again" in caplog.text


def test_losses_are_weighted(daemon: HookDaemon, tmp_path: Path) -> None:
    """The module multiplies its losses; an InfoBatchSampler gets the losses from the callback's hook."""
    callback, sampler = lightning_callback(daemon.mount), InfoBatchSampler(SIZE, epochs=100)
    weighted: list[int] = []

    class Weighted(Module):
        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            losses = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
            hook = callback.attachment.hook
            weights = hook.weights()
            assert weights.tolist() == sampler.weights(hook.indices).tolist()
            weighted.append(int((weights == 2).sum()))
            return (losses * weights).mean()

    drawn = loader(shuffle=False, sampler=sampler)
    trainer(tmp_path, callback, max_epochs=4).fit(Weighted(Network()), drawn, loader(shuffle=False))
    assert sum(weighted[:BATCHES]) == 0
    assert sum(weighted[BATCHES:]) > 10
    # Later epochs are shorter.
    assert len(weighted) < 4 * BATCHES


@pytest.mark.parametrize(
    ("options", "loading"), [({}, STAYING), ({"val_check_interval": 0.5}, {}), ({"limit_train_batches": 3}, {})]
)
def test_a_training_evaluates_in_each_epoch_though_its_length_changes(
    daemon: HookDaemon, options: dict[str, Any], loading: dict[str, Any]
) -> None:
    """An ImpactSampler's epochs have all samples at first, and then a part."""

    class Evaluated(Module):
        evaluations = 0

        def on_validation_epoch_start(self) -> None:
            self.evaluations += not self.trainer.sanity_checking

    daemon.sink.scores_given = np.linspace(0.1, 2, SIZE).astype(np.float32)
    sampler, module = ImpactSampler(SIZE, warm_up=2, sharpness=2.0), Evaluated(Network())
    fit = trainer(daemon.mount, lightning_callback(daemon.mount), max_epochs=6, **options)
    fit.fit(module, loader(sampler=sampler, shuffle=False, **loading), loader(shuffle=False))
    assert len(sampler) < SIZE
    # Half of three batches is one, so such an epoch is evaluated three times.
    assert module.evaluations >= 12 if "val_check_interval" in options else module.evaluations == 6
    until(lambda: len(daemon.sink.ends) == 6)
    assert all(end.accuracy is not None for _, end in daemon.sink.ends)


def test_a_training_that_fails_leaves_the_loader_as_it_was(daemon: HookDaemon) -> None:
    class Failing(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise RuntimeError("no more")

    batches = loader()
    kind = type(batches)
    failing = trainer(daemon.mount, lightning_callback(daemon.mount))
    with pytest.raises(RuntimeError, match="no more"):
        failing.fit(Failing(Network()), batches, loader(shuffle=False))
    assert type(batches) is kind
    assert "process_dataloader" not in vars(failing.strategy)


def test_several_loaders_are_refused(daemon: HookDaemon) -> None:
    several = {"one": loader(), "other": loader()}
    with pytest.raises(ValueError, match="training with one DataLoader"):
        trainer(daemon.mount, lightning_callback(daemon.mount)).fit(Module(Network()), several, loader(shuffle=False))


def test_over_a_mount(tmp_path: Path) -> None:
    make_pictures(tmp_path / "source")
    with mounted(tmp_path / "source", tmp_path / "m", policy="spider") as mount:
        pictures = Pictures(mount.point / "train")
        held_out = DataLoader(Pictures(mount.point / "test"), 8)
        sampler = SpiderSampler(PICTURES)
        callback = lightning_callback(mount.point)
        fit = trainer(tmp_path, callback, accumulate_grad_batches=2)
        fit.fit(Module(Classifier()), DataLoader(pictures, 8, sampler=sampler, **STAYING), held_out)
        check_recorded(mount)
        gc.collect()


def test_a_users_sampler_on_two_ranks_draws_as_without_a_plan(daemon: HookDaemon) -> None:
    def read(planned: bool) -> list[list[Any]]:
        sampler = RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(6))
        batches = loader(sampler=DistributedSamplerWrapper(sampler, num_replicas=2, rank=1), shuffle=False)
        planning = plan(daemon.mount, batches) if planned else None
        drawn = [[batch[0].tolist() for batch in batches] for _ in range(3)]
        if planning is not None:
            planning.close()
        return drawn

    assert read(True) == read(False)


@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_a_loader_that_is_made_of_a_planned_one_draws_as_without_a_plan(daemon: HookDaemon) -> None:
    """Lightning makes one in order to give it another sampler."""

    class Reading(Module):
        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            read.append(batch[0].tolist())
            return super().training_step(batch)

    reads: list[list[Any]] = []
    for planned in (False, True):
        read: list[Any] = []
        batches = loader()
        if planned:
            plan(daemon.mount, batches)
        trainer(daemon.mount, None, callbacks=[], overfit_batches=3).fit(
            Reading(Network()), batches, loader(shuffle=False)
        )
        made = type(batches)(Numbered(), batch_sampler=type(batches.batch_sampler)(range(SIZE), 8, False))
        assert (type(made), type(made.batch_sampler)) == (DataLoader, BatchSampler)
        del batches
        gc.collect()
        read += [inputs.tolist() for inputs, _ in made]
        reads.append(read)
    assert len(reads[0]) == EPOCHS * 3 + BATCHES
    assert reads[0] == reads[1]
