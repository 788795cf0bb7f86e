"""Saved scores whose files are not what was written: they are taken up as they were, or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from fuzzing import damaged, examples
from hypothesis import given
from hypothesis import strategies as st

from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scoring import ScorerOptions, Scoring

LABELS = np.arange(60) % 5
DIMENSION = 4
KINDS: tuple[Literal["exact", "cells", "hnsw"], ...] = ("exact", "cells", "hnsw")
OPTIONS = {kind: ScorerOptions(index=kind, neighbours=5) for kind in KINDS}
CASES = [("graph", "exact"), ("graph", "cells"), ("graph", "hnsw"), ("rank", "exact"), ("loss", "exact")]


def learned(scoring: Scoring) -> Scoring:
    rng = np.random.default_rng(1)
    embeddings = rng.normal(size=(60, DIMENSION)).astype(np.float16)
    scoring.batch(np.arange(60), embeddings, rng.random(60).astype(np.float16))
    scoring.new_epoch()
    return scoring


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str, dict[str, bytes]]:
    name, index = request.param
    directory = tmp_path_factory.mktemp("scores")
    learned(SCORINGS[name](LABELS, DIMENSION, OPTIONS[index])).save(directory)
    return name, index, {path.name: path.read_bytes() for path in directory.iterdir()}


@examples(40)
@given(data=st.data())
def test_damaged_files_are_not_taken_up(saved: tuple[str, str, dict[str, bytes]], data: st.DataObject) -> None:
    name, index, files = saved
    which = data.draw(st.sampled_from(sorted(files)))
    text = data.draw(damaged(files[which]))
    with tempfile.TemporaryDirectory(prefix="scores") as directory:
        for other, whole in files.items():
            (Path(directory) / other).write_bytes(text if other == which else whole)
        found = SCORINGS[name].saved(LABELS, OPTIONS[index], Path(directory))
        if found is None:
            return
        wanted = learned(SCORINGS[name](LABELS, DIMENSION, OPTIONS[index]))
        assert np.array_equal(found.scores, wanted.scores)
        learned(found)
        found.described()
