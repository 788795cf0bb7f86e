"""A distributed training whose two ranks are on two mounts that share scores."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mounting import mounted
from reading import write_files
from tiny_training import CLASSES, Network, Numbered, train_epoch
from torch import Tensor
from torch.utils.data import DataLoader
from two_ranks import in_two_ranks, join_two_ranks

from benchmarks.common.redis_server import RedisServer
from trainer_hook import SpiderSampler, attach

SIZE, EPOCHS = 48, 4
PATIENCE_S = 30.0


class OfMount(Numbered):
    """The samples of `Numbered`, which are also files of a mount."""

    def __init__(self, mount: Path) -> None:
        super().__init__(SIZE)
        self.samples = [(str(mount / name), label) for name, label in self.samples]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        Path(self.samples[index][0]).read_bytes()
        return super().__getitem__(index)


def _rank(rank: int, place: str) -> None:
    join_two_ranks(rank, place)
    mount = Path(place, str(rank), "mnt")
    sampler = SpiderSampler(SIZE, coverage=0.1)
    batches: DataLoader[Any] = DataLoader(OfMount(mount), batch_size=6, sampler=sampler)
    model = Network()
    hook = attach(mount, model, batches)
    epochs = []
    for _ in range(EPOCHS):
        train_epoch(model, batches)
        assert sampler.current is not None
        epochs.append({"order": sampler.current.order.tolist(), "scored": sampler._scores is not None})
        hook.epoch_end()
        # What was sent is heard before the next epoch ends.
        time.sleep(0.3)
    client, until = sampler._client, time.monotonic() + PATIENCE_S
    assert client is not None
    while True:
        scores = client.scores(sampler._list, 5.0)
        found: list[Any] = [None, None]
        torch.distributed.all_gather_object(found, scores)
        if all(one is not None and np.array_equal(one, found[0]) for one in found):
            break
        assert time.monotonic() < until, found
    Path(place, f"drawn-{rank}").write_text(json.dumps(epochs))
    hook.close(10)
    torch.distributed.destroy_process_group()


def test_ranks_on_two_mounts_draw_the_same_and_have_the_same_scores(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_files(source, dict.fromkeys((f"class{index % CLASSES}/{index}.png" for index in range(SIZE)), 1000))
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(tmp_path))
        options = {"cluster": server.url, "substitute": "off"}
        mounts = [stack.enter_context(mounted(source, tmp_path / str(rank), **options)) for rank in (0, 1)]
        in_two_ranks(_rank, tmp_path)
        assert mounts[0].metric("cluster_rows_received") == mounts[1].metric("cluster_rows_sent") == EPOCHS * SIZE // 2
        first, second = (json.loads((tmp_path / f"drawn-{rank}").read_text()) for rank in (0, 1))
    assert first == second
    assert [len(epoch["order"]) for epoch in first] == [SIZE] * EPOCHS
    assert first[-1]["scored"]
    assert len(set(first[-1]["order"])) < SIZE, "drawn by scores"
