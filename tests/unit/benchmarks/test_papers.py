"""What is printed beside the papers' numbers."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks.common.lists import lru_hits
from benchmarks.training import papers
from benchmarks.training.in_process import Epoch
from benchmarks.training.systems_report import Measured, grouped


def measured(system: str, size: float, seed: int, hits: float, top1: float = 0.5, ratio: float = 0.9) -> Measured:
    epoch = Epoch(hits, 900 * (1 - hits), 1.0, 1.0, 0.0, ratio, top1)
    return Measured(system, size, seed, [epoch] * 4, top1, 900.0, [0.8] * 4, [])


def shown(*found: Measured) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    papers.compare(grouped(list(found)), console)
    return console.export_text()


def test_the_hits_of_an_lru_are_those_that_impact_reports() -> None:
    for size, hits in ((0.2, 0.02), (0.4, 0.09), (0.6, 0.23), (0.8, 0.48)):
        assert lru_hits(size) == pytest.approx(hits, abs=0.006)
    assert (lru_hits(0.0), lru_hits(1.0)) == (0.0, 1.0)


def test_a_difference_of_more_than_five_points_is_marked() -> None:
    text = shown(measured("minio", 0.25, 1, 0.24), measured("shade", 0.2, 1, 0.54), measured("impact", 0.4, 1, 0.565))
    rows = {line.split()[0]: line for line in text.splitlines() if line.startswith(("minio", "shade", "impact"))}
    assert "-18.5" in rows["shade"]
    assert papers.NOTABLE in rows["shade"]
    assert papers.NOTABLE not in rows["minio"]
    assert papers.NOTABLE not in rows["impact"]


def test_only_what_the_text_of_a_paper_gives_is_compared() -> None:
    assert "icache" not in shown(measured("icache", 0.2, 1, 0.3), measured("shade", 0.25, 1, 0.3))


def test_the_order_is_compared_seed_by_seed() -> None:
    runs = [
        measured(system, 0.25, seed, hits + 0.01 * seed)
        for system, hits in (("spider-paper", 0.4), ("icache", 0.3), ("shade", 0.35), ("lru", 0.05))
        for seed in (1, 2, 3)
    ]
    text = shown(*runs)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "+10.0 [+10.0, +10.0]" in rows["spider-paper above icache"]
    assert papers.NOTABLE not in rows["spider-paper above icache"]
    assert f"-5.0 [-5.0, -5.0] {papers.NOTABLE}" in rows["icache above shade"]
    # 41/6, 42/7 and 43/8 have the mean 6.07.
    assert rows["spider-paper, times lru's hits"].split()[-1] == "6.1"


def test_table_6_is_beside_its_first_row() -> None:
    fixed = measured("spider-paper, ratio 90", 0.2, 1, 0.4, 0.50)
    falling = measured("spider-paper", 0.2, 1, 0.5, 0.51, 0.8)
    most = measured("spider-paper, ratio 90-50", 0.2, 1, 0.5, 0.57, 0.5)
    text = shown(fixed, falling, most, replace(fixed, seed=2), replace(falling, seed=3))
    rows = {line.split("  ")[0]: line.split() for line in text.splitlines()}
    assert rows["spider-paper"][1:] == ["1", "0.80", "50.0", "0.0", "+1.0", "-0.19", "+1.2", "0.83", "0.76"]
    assert rows["spider-paper, ratio 90-50"][-6:] == ["+7.0", "-2.76", "+9.8", papers.NOTABLE, "0.83", "0.66"]
