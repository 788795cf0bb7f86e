"""The rank of this process in a distributed training, and values that ranks share with each other."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed

_counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()


def rank_and_world() -> tuple[int, int]:
    """The rank of this process and the number of ranks; (0, 1) if the training is not distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def share_of_rank(draws: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """This rank's share of the draws of all ranks: equally many on each rank."""
    rank, world_size = rank_and_world()
    return np.concatenate([draws, np.resize(draws, -len(draws) % world_size)])[rank::world_size]


def shared_store() -> Any:
    """The store of torch.distributed that all ranks share; None if there is one rank."""
    return torch.distributed.distributed_c10d._get_default_store() if rank_and_world()[1] > 1 else None


def count_of(store: Any, name: str) -> int:
    """How often this process has called this for the store and name: the same on all ranks that call it alike."""
    counted = _counts.setdefault(store, Counter())
    counted[name] += 1
    return counted[name]


def from_first_rank(value: Any) -> Any:
    """The value that rank 0 has passed, on every rank; all ranks must call this."""
    if rank_and_world()[1] == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def from_all_ranks(value: Any) -> list[Any]:
    """The values that all ranks have passed, in the order of the ranks; all ranks must call this."""
    world_size = rank_and_world()[1]
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values
