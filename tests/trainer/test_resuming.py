"""A training that goes on in the middle of an epoch, on as many ranks as before or others: nothing is lost or repeated.

One group of three processes makes all trainings: on one rank and on three up to the third batch, and from the state of
these again on more ranks, on as many, and on fewer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy as np
import pytest
import torch
import torch.distributed
from accelerate.data_loader import prepare_data_loader
from hook_daemon import HookDaemon
from lightning.pytorch.strategies import DDPStrategy
from tiny_training import SIZE, Indexed
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from two_ranks import in_processes

import trainer_hook
from benchmarks.fakes import RecordingSink
from trainer_hook import EchoSampler, ImpactSampler, InfoBatchSampler, PoolSampler, ShadeSampler, SpiderSampler

# On how many ranks a training goes on after which.
RANKS = {1: (2,), 3: (3, 2)}
MOST_RANKS = max(RANKS)
SAMPLERS = ("spider", "echo", "infobatch", "shade", "impact")
KINDS = (*SAMPLERS, "plan", "shuffled", "share", "stateful", "accelerate", "lightning")
TAKEN = 3
"""After so many batches of each rank the state is saved."""


def loader_of(kind: str, data: Dataset[Any], **options: Any) -> DataLoader[Any]:
    samplers: dict[str, Any] = {
        "spider": lambda: SpiderSampler(SIZE, seed=2),
        "echo": lambda: EchoSampler(SIZE, seed=2),
        "infobatch": lambda: InfoBatchSampler(SIZE, epochs=9, seed=2),
        "shade": lambda: ShadeSampler(SIZE, seed=2),
        "impact": lambda: ImpactSampler(SIZE, seed=2),
    }
    if kind in samplers:
        sampler = samplers[kind]()
    elif kind == "shuffled" and torch.distributed.get_world_size() == 1:
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(4))  # type: ignore[arg-type]
    else:
        sampler = DistributedSampler(data, seed=5)
    made = StatefulDataLoader if kind == "stateful" else DataLoader
    return made(data, batch_size=3, sampler=sampler, **options)


def train(kind: str, mount: str, state: dict[str, Any] | None, most: int | None) -> tuple[list[int], dict[str, Any]]:
    """One epoch, or the rest of one, with `most` batches; returns the samples, and rank 0's state after them."""
    data, rank = Indexed(), torch.distributed.get_rank()
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if kind == "shuffled" else {}
    batches = loader_of(kind, data, **workers)
    if kind == "accelerate":
        # Of batches, which it deals out to the ranks; it fills the last ones up with the first samples.
        batches = prepare_data_loader(
            DataLoader(data, 3, shuffle=True, generator=torch.Generator().manual_seed(2)),
            num_processes=torch.distributed.get_world_size(),
            process_index=rank,
            put_on_device=False,
        )
    with trainer_hook.plan(mount, batches, split=kind, share=kind == "share") as planning:
        if state is not None:
            planning.load_state_dict(state)
            # As loops do that name their epochs: this one goes on.
            batches.sampler.set_epoch(0) if hasattr(batches.sampler, "set_epoch") else None  # type: ignore[attr-defined]
        taken: list[int] = []
        iterator = iter(batches)
        for batch in itertools.islice(iterator, most):
            taken += batch.tolist()
            if kind == "plan" and rank == 0:
                # One rank alone looks at a batch.
                assert len(next(iter(batches))) == 3
        # As the sum of all gradients does, this waits for all ranks.
        torch.distributed.barrier()
        saved = planning.state_dict() if rank == 0 and most is not None else {}
        torch.distributed.barrier()
        if state is not None:
            following = [one for batch in batches for one in batch.tolist()]
            assert len(following) >= SIZE // torch.distributed.get_world_size(), kind
            assert planning.state_dict() == {} or kind in SAMPLERS
    return taken, saved


class Noting(lightning.pytorch.LightningModule):
    """Notes what each epoch reads; `save` is called after the batch at which the state is saved."""

    def __init__(self, save: Any = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 2)
        self.read: dict[int, list[int]] = {}
        self.save = save

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.read.setdefault(self.current_epoch, []).extend(batch.tolist())
        return self.layer(batch[:, None] / SIZE).square().mean()  # type: ignore[no-any-return]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.save is not None and batch_idx == TAKEN - 1:
            self.trainer.save_checkpoint(self.save)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_by_lightning(number: int, ranks: int, mount: str, before: Path, goes_on: bool) -> list[int]:
    """One epoch up to the batch at which the state is saved, or the rest of one; returns the samples."""
    os.environ |= {"LOCAL_RANK": str(number), "NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    strategy = DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto"
    module, callback = Noting(None if goes_on else before), trainer_hook.lightning_callback(mount)
    fit = lightning.pytorch.Trainer(
        max_epochs=2 if goes_on else 1,
        max_steps=-1 if goes_on else TAKEN,
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=mount,
        callbacks=[callback],
    )
    batches = DataLoader(Indexed(), batch_size=3, shuffle=True)
    fit.fit(module, batches, ckpt_path=before if goes_on else None, weights_only=False if goes_on else None)
    if goes_on:
        assert len(module.read[1]) >= SIZE // ranks
    elif number == 0:
        (state,) = torch.load(before, weights_only=False)["callbacks"].values()
        torch.save(state, before.with_name(before.name.replace("checkpoint", "state")))
    return module.read[0]


def rank_of_all(number: int, mount: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def joined(name: str, ranks: int) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{mount}/{name}", rank=number, world_size=ranks
        )

    meeting = iter(range(100))
    found: dict[str, list[int]] = {}
    for before in RANKS:
        if number < before:
            joined(f"before-{before}", before)
            for kind in KINDS[:-1]:
                found[f"{kind} {before}"], state = train(kind, mount, None, TAKEN)
                if number == 0:
                    torch.save(state, Path(mount, f"state-{kind}-{before}"))
            checkpoint = Path(mount, f"checkpoint-lightning-{before}")
            found[f"lightning {before}"] = train_by_lightning(number, before, mount, checkpoint, False)
            torch.distributed.destroy_process_group()
        joined(f"meet-{next(meeting)}", MOST_RANKS)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        for after in RANKS[before]:
            if number < after:
                joined(f"after-{before}-{after}", after)
                for kind in KINDS[:-1]:
                    state = torch.load(Path(mount, f"state-{kind}-{before}"), weights_only=True)
                    found[f"{kind} {before} {after}"], _ = train(kind, mount, state, None)
                checkpoint = Path(mount, f"checkpoint-lightning-{before}")
                found[f"lightning {before} {after}"] = train_by_lightning(number, after, mount, checkpoint, True)
                torch.distributed.destroy_process_group()
    Path(mount, f"found-{number}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """What all ranks took, for each kind and numbers of ranks."""
    mount = tmp_path_factory.mktemp("resuming")
    scores = np.linspace(0.1, 2, SIZE).astype(np.float32)
    sink = RecordingSink(scores_given=scores, give=lambda question: [*reversed(range(SIZE))][: len(question.wanted)])
    taken: dict[str, list[int]] = {}
    with HookDaemon(mount, sink):
        in_processes(rank_of_all, mount, MOST_RANKS)
    for rank in range(MOST_RANKS):
        for name, samples in json.loads((mount / f"found-{rank}.json").read_text()).items():
            taken.setdefault(name, []).extend(samples)
    return mount, taken


@pytest.mark.parametrize(("before", "after"), [(before, after) for before in RANKS for after in RANKS[before]])
@pytest.mark.parametrize("kind", KINDS)
def test_no_sample_is_lost_or_repeated(
    found: tuple[Path, dict[str, list[int]]], kind: str, before: int, after: int
) -> None:
    mount, taken = found
    state = torch.load(mount / f"state-{kind}-{before}", weights_only=True)
    epoch = Counter(torch.as_tensor(state["order"]).tolist())
    if kind == "accelerate":
        assert set(epoch) == set(range(SIZE))
    elif kind not in SAMPLERS:
        assert epoch == Counter(range(SIZE))
    begun = taken[f"{kind} {before}"]
    assert len(begun) == state["consumed"] == TAKEN * 3 * before
    whole = Counter(begun) + Counter(taken[f"{kind} {before} {after}"])
    assert not epoch - whole, "lost"
    # So that all ranks read equally many, fewer than there are ranks are read once more.
    assert (whole - epoch).total() == -(epoch.total() - len(begun)) % after
    assert (whole - epoch).total() < after


class Unreadable(Indexed):
    """Sample 7 cannot be read while the file `broken` is there."""

    def __init__(self, broken: Path) -> None:
        super().__init__()
        self._broken = broken

    def __getitem__(self, index: int) -> int:
        if index == 7 and self._broken.exists():
            raise OSError("no sample")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "multiprocessing_context": "fork"}])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_batch_that_could_not_be_read_is_part_of_the_rest(
    daemon: HookDaemon, tmp_path: Path, workers: dict[str, Any], sampled: bool
) -> None:
    data, taken = Unreadable(tmp_path / "broken"), list[int]()
    (tmp_path / "broken").touch()

    def batches() -> DataLoader[int]:
        drawn = {"sampler": PoolSampler(SIZE)} if sampled else {"generator": torch.Generator().manual_seed(1)}
        return DataLoader(data, batch_size=8, shuffle=None if sampled else True, **drawn, **workers)  # type: ignore[arg-type]

    with trainer_hook.plan(daemon.mount, failing := batches()) as planning:
        iterator = iter(failing)
        with contextlib.suppress(OSError):
            for batch in iterator:
                taken += batch.tolist()
        assert 7 not in taken
        state = planning.state_dict()
        # A loop that goes on has passed it over.
        after = next(iterator, torch.empty(0)).tolist()
        if len(taken) + 8 + len(after) < SIZE:
            assert planning.state_dict()["consumed"] == len(taken) + 8 + len(after)
    (tmp_path / "broken").unlink()
    with trainer_hook.plan(daemon.mount, again := batches()) as planning:
        planning.load_state_dict(state)
        assert sorted(taken + [one for batch in again for one in batch.tolist()]) == [*range(SIZE)]


def test_the_rest_can_be_left_again(daemon: HookDaemon) -> None:
    state: dict[str, Any] = {}
    taken: list[int] = []
    for _ in range(3):
        batches = DataLoader(Indexed(), batch_size=8, shuffle=True)
        with trainer_hook.plan(daemon.mount, batches) as planning:
            planning.load_state_dict(state)
            assert planning.state_dict() == state
            for batch in itertools.islice(batches, 2):
                taken += batch.tolist()
            state = planning.state_dict()
    assert state["consumed"] == 48
    assert len(set(taken)) == 48


def test_a_sampler_that_is_set_to_a_later_epoch_leaves_the_state_out(daemon: HookDaemon) -> None:
    batches = DataLoader(Indexed(), batch_size=8, sampler=DistributedSampler(Indexed(), 1, 0))
    with trainer_hook.plan(daemon.mount, batches) as planning:
        next(iter(batches))
        planning.load_state_dict(planning.state_dict())
        batches.sampler.set_epoch(1)  # type: ignore[attr-defined]
        assert len([*batches]) == 7


def test_a_state_of_a_sampler_without_a_number_goes_on_in_a_later_epoch(daemon: HookDaemon) -> None:
    """As where one rank shuffled, and the samplers of two are told the epoch: by Lightning, or by the loop."""
    with trainer_hook.plan(daemon.mount, batches := DataLoader(Indexed(), batch_size=8, shuffle=True)) as planning:
        assert len([*batches]) == 7
        taken = next(iter(batches)).tolist()
        state = planning.state_dict()
    batches = DataLoader(Indexed(), batch_size=8, sampler=DistributedSampler(Indexed(), 1, 0))
    with trainer_hook.plan(daemon.mount, batches) as planning:
        planning.load_state_dict(state)
        batches.sampler.set_epoch(1)  # type: ignore[attr-defined]
        assert sorted(taken + [one for batch in batches for one in batch.tolist()]) == [*range(SIZE)]


def test_a_loader_that_drops_its_last_batch_drops_it_of_the_rest(daemon: HookDaemon) -> None:
    for options, left in (({"drop_last": True}, 3), ({}, 4)):
        batches = DataLoader(Indexed(), batch_size=8, **options)  # type: ignore[arg-type]
        with trainer_hook.plan(daemon.mount, batches) as planning:
            planning.load_state_dict(planning.planner._list | {"order": [*range(SIZE)], "consumed": 20})
            assert [len(batch) for batch in batches] == [8, 8, 8, 6][:left]
            assert planning.state_dict() == {}


def test_an_epoch_that_the_hook_is_told_is_over_is_over(daemon: HookDaemon) -> None:
    for sampler in (None, SpiderSampler(SIZE)):
        batches = DataLoader(Indexed(), batch_size=8, sampler=sampler)
        with trainer_hook.plan(daemon.mount, batches) as planning:
            next(iter(batches))
            assert planning.state_dict()["consumed"] == 8
            planning.planner.epoch_over()
            state = planning.state_dict()
            assert state == {} if sampler is None else state["consumed"] == SIZE


@pytest.mark.parametrize("numbers", [(0, 1, 2), (3, 4, 5), (2, 3, 4)])
def test_a_caller_that_counts_its_epochs_from_its_start(numbers: tuple[int, ...]) -> None:
    """Accelerate names the epochs of a process from 0 on, also after a state was loaded."""
    sampler, again = SpiderSampler(SIZE), SpiderSampler(SIZE)
    sampler.set_epoch(3)
    drawing = iter(sampler)
    begun = [next(drawing) for _ in range(10)]
    again.load_state_dict(sampler.state_dict())
    expected = [[*begun, *drawing], [*sampler], [*sampler]]
    drawn = []
    for number in numbers:
        again.set_epoch(number)
        drawn.append([*again])
    assert [begun + drawn[0], *drawn[1:]] == expected


class Listed(Indexed):
    """Its list has these names."""

    def __init__(self, names: list[str]) -> None:
        self.samples = [(name, 0) for name in names]

    def __len__(self) -> int:
        return len(self.samples)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_state_says_of_which_list_it_is(daemon: HookDaemon, sampled: bool) -> None:
    """One file more, another order, other names: an epoch of another list would lose samples, and repeat others."""
    names = [f"{number:03}.png" for number in range(1, SIZE + 1)]

    def planned(names: list[str]) -> tuple[DataLoader[int], trainer_hook.Planning]:
        drawn = {"sampler": PoolSampler(len(names))} if sampled else {"shuffle": True}
        batches = DataLoader(Listed(names), 8, **drawn)  # type: ignore[arg-type]
        return batches, trainer_hook.plan(daemon.mount, batches)

    batches, planning = planned(names)
    with planning:
        next(iter(batches))
        state = planning.state_dict()
    wrong = {
        "it has 50 samples, and this list 51": ["000.png", *names],
        "its files have other names, or another order": names[::-1],
        "its files have other names": [f"other/{name}" for name in names],
    }
    for why, others in wrong.items():
        _, planning = planned(others)
        with planning, pytest.raises(ValueError, match=f"^the state is of another list: {why}") as refused:
            planning.load_state_dict(state)
        assert "\n" not in str(refused.value)
    batches, planning = planned(names)
    with planning, pytest.raises(ValueError, match=r"^the state does not name its list") as refused:
        planning.load_state_dict({name: value for name, value in state.items() if name not in ("samples", "names")})
    with planned(names)[1] as planning:
        planning.load_state_dict(state)


def test_a_sampler_says_of_how_many_samples_its_state_is() -> None:
    state = PoolSampler(48).state_dict() | {"order": [*range(48)], "consumed": 16}
    with pytest.raises(ValueError, match=r"^the state is of another list: it has 48 samples, and this list 60"):
        PoolSampler(60).load_state_dict(state)
