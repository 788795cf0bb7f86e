"""Where two_jobs.py could silently be wrong: who shares what, and who changes whose random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.training import in_process, two_jobs
from benchmarks.training.training import Data

pytestmark = pytest.mark.thorough

SAMPLES, CLASSES, EPOCHS = 256, 4, 3
SIDE = 8


@pytest.fixture(scope="module")
def pool() -> Any:
    """Noise around a colour for each class."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(SAMPLES) % CLASSES
    colours = torch.randn(CLASSES, 3, 1, 1, generator=generator)[labels]
    images = colours + 0.5 * torch.randn(SAMPLES, 3, SIDE, SIDE, generator=generator)
    held_out = Data(Path(), [], 0, images[:64], labels[:64], CLASSES)
    return in_process.Pool(images, labels, [700] * SAMPLES, held_out)


def measured(pool: Any, arrangement: str) -> dict[str, two_jobs.Job]:
    return {job.network: job for job in two_jobs.measure_task(pool, two_jobs.Task(arrangement, 1), EPOCHS)}


def test_a_training_alone_knows_nothing_of_the_other(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both = measured(pool, "alone")
    assert both["residual"] != both["plain"]
    monkeypatch.setattr(two_jobs, "RECIPES", {"plain": two_jobs.RECIPES["plain"]})
    assert measured(pool, "alone") == {"plain": both["plain"]}


def test_two_trainings_share_a_cache_and_no_scores(pool: Any) -> None:
    alone, together = measured(pool, "alone"), measured(pool, "together")
    # In the first epoch each reads every sample once; only what the other has read can be cached.
    assert sum(job.epochs[0].hit_ratio for job in alone.values()) == 0
    assert sum(job.epochs[0].hit_ratio for job in together.values()) > 0
    for job in together.values():
        assert len(job.epochs) == EPOCHS
        assert job.fetched == pytest.approx(
            sum((1 - epoch.hit_ratio) * epoch.reads_share for epoch in job.epochs), rel=1e-6
        )


def test_the_last_writer_wins_where_nothing_is_merged() -> None:
    naive, merged = two_jobs.LastWriter(), two_jobs.Worths()
    for worths in (naive, merged):
        worths.scored("1", [1, 2, 3], [5.0, 6.0, 7.0])
    assert dict(naive.scored("2", [2, 3], [0.1, 0.2])) == {2: 0.1, 3: 0.2}
    for end in (naive.epoch_ended, naive.forget):
        end("1")
        assert dict(naive.due(3)) == {}
    found = dict(merged.scored("2", [2, 3], [0.1, 0.2]))
    assert found[3] == max(found.values()) <= 1


def test_each_training_has_random_numbers_of_its_own() -> None:
    def draws(count: int, found: list[float]) -> two_jobs.Running:
        for _ in range(count):
            found.append(float(torch.rand(())))
            yield
        return []

    one: list[float] = []
    two_jobs.in_turns({"one": draws(3, one)}, 7)
    first: list[float] = []
    second: list[float] = []
    two_jobs.in_turns({"first": draws(3, first), "second": draws(5, second)}, 7)
    assert one == first == second[:3]


def test_what_was_measured_is_kept(pool: Any, tmp_path: Path) -> None:
    extent = two_jobs.Extent(EPOCHS, SAMPLES, 64, 1)
    jobs = list(measured(pool, "alone").values())
    path = tmp_path / "jobs.json"
    two_jobs.save(path, two_jobs.result_of(extent, jobs))
    assert two_jobs.jobs_in(path, extent) == jobs
    with pytest.raises(RuntimeError, match="other settings"):
        two_jobs.jobs_in(path, two_jobs.Extent(EPOCHS + 1, SAMPLES, 64, 1))
