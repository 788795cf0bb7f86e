"""This process among those of a distributed training."""

from __future__ import annotations

from typing import Any

import torch.distributed


def rank_and_world() -> tuple[int, int]:
    """Rank and number of processes; (0, 1) where the training is not distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def from_first_rank(value: Any) -> Any:
    """What rank 0 gives, on every rank; all of them must call this."""
    if rank_and_world()[1] == 1:
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]
