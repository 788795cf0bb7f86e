"""refurbish in a training of two processes: one order is dealt out, and what one rank has made the other uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.data_loader import prepare_data_loader
from noisy_files import BATCH, SAMPLES, Noise, Numbers, write_numbers
from torch.utils.data import DataLoader, DistributedSampler
from two_ranks import in_two_ranks

import trainer_hook
from trainer_hook.ranks import from_all_ranks

REUSE, EPOCHS = 2, 5


def train(rank: int, directory: str) -> None:
    data = Numbers(Path(directory) / "source", last=0)
    for sampler in (DistributedSampler(data), None):
        Noise.runs = 0
        loader = DataLoader(data, BATCH, sampler=sampler, shuffle=None if sampler else True)
        loader = trainer_hook.refurbish(loader, split=1, reuse=REUSE)
        assert len(loader) == SAMPLES // 2 // BATCH
        stores = from_all_ranks(str(loader.dataset._store.directory))  # type: ignore[attr-defined]
        assert stores[0] == stores[1]
        before: dict[int, float] = {}
        for epoch in range(EPOCHS):
            drawn = [(int(label), float(image[0])) for images, labels in loader for image, label in zip(images, labels)]  # noqa: B905
            shares = from_all_ranks(drawn)
            now = dict(shares[0] + shares[1])
            assert sorted(now) == list(range(SAMPLES))
            assert len(shares[0]) == len(shares[1])
            if epoch:
                assert sum(now[label] == before[label] for label in now) == SAMPLES // REUSE
            before = now
        # As many as one process would make, though a sample is often the other rank's in the next epoch.
        assert sum(from_all_ranks(Noise.runs)) == SAMPLES + (EPOCHS - 1) * SAMPLES // REUSE
        prepared = prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=False)
        with pytest.raises(RuntimeError, match="leave the refurbished loader out of prepare"):
            next(iter(prepared))
        del loader, prepared


def test_two_ranks_share_one_epoch_and_what_they_have_made(tmp_path: Path) -> None:
    write_numbers(tmp_path / "source")
    in_two_ranks(train, tmp_path)
