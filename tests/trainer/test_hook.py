"""The hook in real trainings: whatever the loop does, an embedding is sent as that of the right sample."""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_daemon import HookDaemon, until
from tiny_training import CLASSES, SIZE, WIDTH, Network, Numbered, features, loader, recorded, train, train_epoch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from two_ranks import in_two_ranks

from trainer_hook import HookOptions, attach
from trainer_hook.model.capture import projection

BATCHES = 7  # of 50 samples in eights


def run(daemon: HookDaemon, batches: DataLoader[Any], model: nn.Module | None = None, epochs: int = 1) -> None:
    model = model or Network()
    hook = attach(daemon.mount, model, batches)
    for _ in range(epochs):
        train_epoch(model, batches)
        hook.epoch_end(0.5)
    hook.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True, "prefetch_factor": 3},
        {"batch_size": None},
        {"batch_size": SIZE},
    ],
)
def test_every_sample_is_recorded_as_itself(daemon: HookDaemon, options: dict[str, Any]) -> None:
    model: nn.Module = Network()
    if options.get("batch_size", 8) is None:
        model = nn.Sequential(nn.Unflatten(0, (1, WIDTH)), model)
        dataset = Numbered()
        dataset.__class__ = type(
            "Single", (Numbered,), {"__getitem__": lambda self, i: (features(i), torch.tensor([i % 3]))}
        )
        options = options | {"dataset": dataset}
    batches = loader(**options)
    count = {8: BATCHES, SIZE: 1}.get(options.get("batch_size", 8), SIZE)
    run(daemon, batches, model, epochs=2)
    assert sorted(recorded(daemon, 2 * count)) == sorted([*range(SIZE)] * 2)
    assert [(end.epoch, end.accuracy) for _, end in daemon.sink.ends] == [(0, 0.5), (1, 0.5)]
    steps = [(batch.epoch, batch.step) for _, batch in daemon.sink.batches]
    assert steps == [(epoch, step) for epoch in (0, 1) for step in range(count)]
    del batches
    gc.collect()


def test_declares_the_list_in_the_order_of_indices(daemon: HookDaemon) -> None:
    subset: Any = Subset(ConcatDataset([Numbered(10), Numbered(5)]), [12, 0, 3])
    run(daemon, loader(subset, batch_size=3))
    ((trainer, declared),) = daemon.sink.lists
    assert list(declared.paths) == [b"class2/2.png", b"class0/0.png", b"class0/3.png"]
    assert (declared.labels.tolist(), declared.split, trainer.pid) == ([2, 0, 0], "train", os.getpid())


def test_losses_are_the_cross_entropy_against_the_declared_labels(daemon: HookDaemon) -> None:
    model, batches = Network(), loader(shuffle=False)
    hook = attach(daemon.mount, model, batches)
    inputs, labels = next(iter(batches))
    expected = nn.functional.cross_entropy(model(inputs), labels, reduction="none")
    hook.close()
    recorded(daemon, 1)
    losses: Any = daemon.sink.batches[0][1].losses
    np.testing.assert_allclose(losses, expected.detach().numpy(), rtol=1e-2)


def test_losses_that_the_training_gives(daemon: HookDaemon, caplog: pytest.LogCaptureFixture) -> None:
    model, batches = Network(), loader()
    hook = attach(daemon.mount, model, batches)
    for inputs, _ in batches:
        rows = len(model(inputs))
        hook.losses(torch.arange(rows) * 1e6)
        hook.losses(torch.ones(rows + 1))
    hook.close()
    assert "losses of shape (9,) for 8 samples are left out" in caplog.text
    recorded(daemon, BATCHES)
    losses: Any = daemon.sink.batches[0][1].losses
    assert losses.tolist()[:2] == [0, 65504]


def test_a_loop_that_takes_batches_ahead_without_saying_so_is_noticed(
    daemon: HookDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    model, batches = Network(), loader()
    hook = attach(daemon.mount, model, batches)
    taken = list(batches)
    train_epoch(model, [(inputs.clone(), labels) for inputs, labels in taken])
    hook.epoch_end()
    hook.close()
    assert "attach with HookOptions(lookahead=)" in caplog.text
    assert not daemon.sink.batches
    assert hook.counts["unmatched"] == BATCHES
    until(lambda: daemon.counted["hook_forwards_unmatched"] == BATCHES)


def test_forward_passes_of_parts_of_a_batch_are_put_together(daemon: HookDaemon) -> None:
    model, batches = Network().train(), loader(batch_size=10)
    hook = attach(daemon.mount, model, batches)
    for step, (inputs, _) in enumerate(batches):
        if step == 0:
            for chunk in inputs.split(4):
                model(chunk)
        elif step == 1:
            model(inputs[:7])
        elif step == 2:
            model(torch.cat([inputs, inputs]))
        else:
            model(inputs)
    hook.close()
    assert len(recorded(daemon, 4)) == 37
    assert hook.counts["unmatched"] == 1


@pytest.mark.parametrize(("attach_first", "fullgraph"), [(True, False), (False, True)])
def test_torch_compile(daemon: HookDaemon, attach_first: bool, fullgraph: bool) -> None:
    torch.compiler.reset()
    model, batches = Network(), loader()
    compiled: Any = model
    if not attach_first:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    hook = attach(daemon.mount, compiled, batches)
    if attach_first:
        compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    for _ in train(compiled, batches):
        compiled.eval()
        with torch.no_grad():
            compiled(torch.ones(8, WIDTH))
        compiled.train()
    hook.close()
    assert sorted(recorded(daemon, BATCHES)) == [*range(SIZE)]


@pytest.mark.parametrize(
    ("before", "attached_again"),
    [
        ("the model", True),
        *(pytest.param(before, False, marks=pytest.mark.thorough) for before in ("nothing", "another model")),
    ],
)
def test_torch_compile_beside_models_of_the_same_class_without_a_hook(
    daemon: HookDaemon, before: str, attached_again: bool
) -> None:
    torch.compiler.reset()
    # As in a process that has never attached a hook.
    config: Any = importlib.import_module("torch._dynamo.config")
    config.skip_nnmodule_hook_guards = True
    batches = loader()
    model: Any = torch.compile(Network(), backend="eager", fullgraph=True)
    other: Any = torch.compile(Network(), backend="eager", fullgraph=True)
    if before != "nothing":
        train_epoch(model if before == "the model" else other, loader())
    hook = attach(daemon.mount, model, batches)
    for _ in range(3):
        if attached_again:
            hook.close()
            hook = attach(daemon.mount, model, batches)
        others = torch.randn(8, WIDTH)
        other(others)
        for _ in train(model, batches):
            other(others)
    hook.close()
    other(others)
    assert sorted(recorded(daemon, 3 * BATCHES)) == sorted([*range(SIZE)] * 3)


def test_checkpointing_computes_again_but_is_recorded_once(daemon: HookDaemon) -> None:
    class Checkpointed(Network):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, inputs, use_reentrant=False)  # type: ignore[no-any-return]

    run(daemon, loader(), Checkpointed())
    assert sorted(recorded(daemon, BATCHES)) == [*range(SIZE)]


def test_wide_embeddings_are_projected_alike_everywhere(daemon: HookDaemon) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 200), nn.ReLU(), nn.Linear(200, CLASSES))
    batches = loader(shuffle=False, batch_size=SIZE)
    for _ in range(2):
        hook = attach(daemon.mount, model, batches, options=HookOptions(embed_dim=16))
        inputs, _ = next(iter(batches))
        model(inputs)
        hook.close()
    until(lambda: len(daemon.sink.batches) == 2)
    one, two = (batch.embeddings for _, batch in daemon.sink.batches)
    np.testing.assert_array_equal(one, two)
    # Johnson-Lindenstrauss: unit vectors stay near unit length.
    assert one.shape == (SIZE, 16)
    assert abs(np.linalg.norm(one.astype(np.float32), axis=1).mean() - 1) < 0.3


@pytest.mark.parametrize("embed_dim", [16, 512])
def test_raw_embeddings_keep_their_lengths(daemon: HookDaemon, embed_dim: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 200), nn.ReLU(), nn.Linear(200, CLASSES))
    batches = loader(shuffle=False, batch_size=SIZE)
    hook = attach(daemon.mount, model, batches, options=HookOptions(embed_dim=embed_dim, embeddings="raw"))
    inputs, _ = next(iter(batches))
    model(100 * inputs)
    hook.close()
    until(lambda: len(daemon.sink.batches) == 1)
    ((_, batch),) = daemon.sink.batches
    with torch.no_grad():
        expected = model[1](model[0](100 * inputs))
        if embed_dim < 200:
            expected = expected @ projection(200, embed_dim)
    assert np.linalg.norm(batch.embeddings.astype(np.float32), axis=1).mean() > 2
    np.testing.assert_allclose(batch.embeddings, expected, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize("shape", [(4, 5), (4, 2, 2)])
def test_classifiers_over_positions_are_averaged(daemon: HookDaemon, shape: tuple[int, ...]) -> None:
    layer: nn.Module = nn.Linear(5, CLASSES) if len(shape) == 2 else nn.Conv2d(4, CLASSES, 1)
    model = nn.Sequential(layer)
    hook = attach(daemon.mount, model, None, samples=[("a", 0), ("b", 1)], options=HookOptions(classifier="0"))
    hook.batch([1, 0])
    model(torch.ones(2, *shape))
    hook.close()
    until(lambda: len(daemon.sink.batches) == 1)
    ((_, batch),) = daemon.sink.batches
    assert (batch.indices.tolist(), batch.embeddings.shape, batch.losses) == (
        [1, 0],
        (2, 5 if len(shape) == 2 else 4),
        None,
    )


def test_numbers_that_are_not_finite_are_not_sent(daemon: HookDaemon) -> None:
    model, batches = Network(), loader(batch_size=SIZE)
    with torch.no_grad():
        model.classifier.weight.fill_(float("nan"))
    run(daemon, batches, model)
    assert not daemon.sink.batches
    assert not daemon.counted["hook_malformed"]


def test_leaves_model_and_loader_as_they_were(daemon: HookDaemon) -> None:
    model, batches = Network(), loader()
    sampler = batches.batch_sampler
    hook = attach(daemon.mount, model, batches)
    assert isinstance(batches, DataLoader)
    assert batches.batch_sampler.batch_size == 8  # type: ignore[union-attr]
    assert len(batches) == len(iter(batches)) == BATCHES
    with pytest.raises(ValueError, match="a hook already"):
        attach(daemon.mount, model, batches)
    hook.close()
    assert type(batches) is DataLoader
    assert batches.batch_sampler is sampler
    assert not model.classifier._forward_hooks
    attach(daemon.mount, model, batches).close()


def test_copies_of_the_model_are_not_recorded(daemon: HookDaemon, tmp_path: Path) -> None:
    model, batches = Network(), loader()
    hook = attach(daemon.mount, model, batches)
    average = copy.deepcopy(model)
    torch.save(model, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    compiled = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    # It can be loaded where there is no hook.
    assert b"trainer_hook" not in (tmp_path / "model").read_bytes()
    for _ in train(model, batches):
        average(torch.ones(8, WIDTH))
        loaded(torch.ones(8, WIDTH))
        compiled(torch.ones(8, WIDTH))
    hook.close()
    assert sorted(recorded(daemon, BATCHES)) == [*range(SIZE)]


def test_arguments_that_can_never_work_are_refused_at_once(tmp_path: Path) -> None:
    class Stream(IterableDataset[int]):
        samples = (("a", 0),)

        def __iter__(self) -> Iterator[int]:
            return iter((0,))

    class Nameless(Numbered):
        def __init__(self) -> None:
            self.data = [0, 1]

        def __len__(self) -> int:
            return 2

    model = Network()
    for words, arguments, options in [
        ("no .samples or .imgs", (model, loader(Nameless())), {}),
        ("iterable data set", (model, DataLoader(Stream())), {}),
        ("in order", (model, loader(in_order=False, num_workers=1, multiprocessing_context="fork")), {}),
        ("no Linear", (nn.Conv2d(1, 1, 1), loader()), {}),
        ("no layer 'head'", (model, loader()), {"options": HookOptions(classifier="head")}),
        ("epoch=None: give the number", (model, loader()), {"epoch": None}),
        ("split of 1025 bytes: give at most", (model, loader()), {"split": "x" * 1025}),
        ("no samples", (model, None), {"samples": []}),
    ]:
        with pytest.raises(ValueError, match=words):
            attach(tmp_path, *arguments, **options)  # type: ignore[arg-type]
    for words, rare in [
        ("embed_dim=4097", {"embed_dim": 4097}),
        ("lookahead=-1", {"lookahead": -1}),
        ("queue_batches=0: give 1", {"queue_batches": 0}),
        ("embeddings='long': give 'unit' or 'raw'", {"embeddings": "long"}),
    ]:
        with pytest.raises(ValueError, match=words):
            HookOptions(**rare)


def test_warns_when_the_classifier_does_not_run(daemon: HookDaemon, caplog: pytest.LogCaptureFixture) -> None:
    hook = attach(daemon.mount, Network(), loader(batch_size=1))
    train_epoch(Network(), iter(loader(batch_size=1)))
    hook.close()
    assert "has not run" not in caplog.text
    batches = loader(batch_size=1)
    hook = attach(daemon.mount, Network(), batches)
    train_epoch(Network(), batches)
    hook.close()
    assert "the classifier has not run in training" in caplog.text


# -- distributed


def _rank(rank: int, mount: str) -> None:
    logging.disable()
    dataset = Numbered()
    sampler: Any = torch.utils.data.DistributedSampler(dataset, 2, rank)
    batches: DataLoader[Any] = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Network())
    hook = attach(mount, model, batches)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        train_epoch(model, batches)
        hook.epoch_end()
    hook.close(10)


def test_two_ranks(daemon: HookDaemon) -> None:
    pids = in_two_ranks(_rank, daemon.mount)
    indices = recorded(daemon, 2 * 2 * 4)
    assert sorted(indices) == sorted([*range(SIZE)] * 2)
    trainers = {trainer for trainer, _ in daemon.sink.batches}
    assert {(trainer.rank, trainer.hello.world_size) for trainer in trainers} == {(0, 2), (1, 2)}
    assert {trainer.pid for trainer in trainers} == pids


def test_hooks_of_earlier_folds_need_not_be_closed(daemon: HookDaemon) -> None:
    """A hook whose loader was freed does not disturb the next one, even if a variable still refers to the hook."""
    for fold in range(4):
        model, batches = Network(), loader(Subset(Numbered(), range(fold, SIZE, 4)))
        hook = attach(daemon.mount, model, batches)
        train_epoch(model, batches)
        hook.epoch_end(0.5)
    until(lambda: len(daemon.sink.ends) == 4)
    assert [len(declared) for _, declared in daemon.sink.lists] == [13, 13, 12, 12]
    other = loader(Subset(Numbered(), range(7)))
    with pytest.raises(ValueError, match="is called 'train'"):
        attach(daemon.mount, model, other)
    del model, batches, hook
    hook = attach(daemon.mount, Network(), other)
    hook.epoch_end(0.5)
    until(lambda: len(daemon.sink.ends) == 5)
    hook.close()


@pytest.mark.parametrize("new_loader", [False, True])
def test_attaching_again_leaves_one_hook(daemon: HookDaemon, new_loader: bool) -> None:
    model, batches = Network(), loader()
    kept = [batches]
    hook = attach(daemon.mount, model, batches)
    hooks = _torch_hooks(model)
    for epoch in range(5):
        train_epoch(model, batches)
        hook.epoch_end()
        if new_loader:
            batches = loader()
            kept.append(batches)
        hook = attach(daemon.mount, model, batches, job=hook.job, epoch=hook.epoch)
        assert hook.epoch == epoch + 1
        assert _torch_hooks(model) == hooks
    hook.close()
    assert _torch_hooks(model) == 0
    assert sorted(recorded(daemon, 5 * BATCHES)) == sorted([*range(SIZE)] * 5)
    assert {batch.epoch for _, batch in daemon.sink.batches} == {*range(5)}
    assert len({trainer.hello.job for trainer, _ in daemon.sink.batches}) == 1
    assert {type(one) for one in kept} == {DataLoader}


def _torch_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_loaders_side_by_side_have_a_hook_each(daemon: HookDaemon) -> None:
    """Two loaders of one list, as for weak and strong augmentation, under the id of the program that started them."""
    model, weak, strong = Network(), loader(shuffle=False), loader()
    hooks = [attach(daemon.mount, model, one, job="run-1") for one in (weak, strong)]
    for (inputs, _), (others, _) in zip(weak, strong, strict=True):
        model(inputs)
        model(others)
    for hook in hooks:
        hook.close()
    assert sorted(recorded(daemon, 2 * BATCHES)) == sorted([*range(SIZE)] * 2)


def test_a_freed_hook_disconnects_from_the_daemon(daemon: HookDaemon) -> None:
    def fit() -> weakref.ref[nn.Module]:
        model, batches = Network(), loader()
        attach(daemon.mount, model, batches)
        train_epoch(model, batches)
        return weakref.ref(model)

    model = fit()
    gc.collect()
    assert model() is None
    until(lambda: "detached" in [name for name, _ in daemon.sink.calls])


def test_a_freed_hook_disconnects_from_a_dead_daemon_too(daemon: HookDaemon, caplog: pytest.LogCaptureFixture) -> None:
    model, batches = Network(), loader()
    hook = attach(daemon.mount, model, batches)
    until(lambda: bool(daemon.sink.lists))
    daemon.__exit__()
    train_epoch(model, batches)
    until(lambda: "cannot be reached" in caplog.text)
    gone = weakref.ref(hook)
    del model, batches, hook
    gc.collect()
    assert gone() is None
    daemon.__enter__()
