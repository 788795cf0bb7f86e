"""Files of one vector each, which lie around a centre for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

WIDTH = 40


def write_vectors(directory: Path, classes: int, each: int, apart: float = 1.0) -> Path:
    """Write `classK/NN.npy`, `each` of them a class; the centres lie `apart` times as far apart as samples scatter."""
    rng = np.random.default_rng(1)
    for kind in range(classes):
        centre = apart * rng.normal(size=WIDTH)
        for number in range(each):
            file = directory / f"class{kind}" / f"{number:02d}.npy"
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, centre + rng.normal(size=WIDTH))
    return directory
