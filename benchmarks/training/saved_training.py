"""Saving an unfinished training without a mount, so that it goes on as if it had never been interrupted.

Model, optimizer and schedule are saved by their own state. Everything else that decides (cache, engine, policy, scorer,
sampler, random generators) is pickled as it is: what a mount saves of these leaves out what a remount can do without,
and would change the rest of the training. A file is a pickle, which runs code when it is read: read only your own.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.training.in_process import Training
from benchmarks.training.systems_report import Epoch


# The class is not in the program, whose module has one name in a single process and another in one of several: what one
# of them has pickled, the other could not read.
@dataclass
class Done:
    """What an unfinished training has done, and what it is: another one does not go on with it."""

    what: dict[str, Any]
    epochs: list[Epoch] = field(default_factory=list)
    reads: list[NDArray[np.uint32]] = field(default_factory=list)
    """The samples of each epoch, in the order in which they were read."""
    seconds: list[float] = field(default_factory=list)
    """How long each epoch took, the evaluation after it included."""


def save_training(path: Path, training: Training, done: Done) -> None:
    """Write the training, between two epochs; a crash leaves the file that was there before."""
    state = {
        "model": training.model.state_dict(),
        "steps": training.steps.state_dict(),
        "decides": (training.cache, training.sampler, training.rng),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "done": done,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        _Pickler(file, training).dump(state)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_training(path: Path, training: Training) -> Done:
    """Bring a training that was just made to where the saved one was; returns what that had done."""
    with path.open("rb") as file:
        state = _Unpickler(file, training).load()
    training.model.load_state_dict(state["model"])
    training.steps.load_state_dict(state["steps"])
    training.cache, training.sampler, training.rng = state["decides"]
    torch.set_rng_state(state["random"])
    if state["random_cuda"]:
        torch.cuda.set_rng_state_all(state["random_cuda"])
    done: Done = state["done"]
    return done


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, training: Training) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._training = training

    def persistent_id(self, found: Any) -> str | None:
        # The sampler holds a method of the training, by which it evaluates.
        return "training" if found is self._training else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, training: Training) -> None:
        super().__init__(file)
        self._training = training

    def persistent_load(self, name: Any) -> Training:
        assert name == "training"
        return self._training
