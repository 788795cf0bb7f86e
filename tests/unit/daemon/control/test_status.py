"""What the figures of a mount mean where the page cache answers unseen, and how a component tells its state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from spiderfs.daemon.control.texts import of_all_opens, plain


@pytest.mark.parametrize(
    ("opens", "hits", "unseen", "ratio", "bytes_per_open"),
    [(0, 0, 0, 0.0, 0.0), (10, 4, 0, 0.4, 100.0), (10, 4, 30, 0.85, 25.0), (0, 0, 5, 1.0, 200.0)],
)
def test_what_the_page_cache_answered_is_an_open_and_a_hit(
    opens: int, hits: int, unseen: int, ratio: float, bytes_per_open: float
) -> None:
    counters = {"opens": opens, "opens_hit": hits, "page_cache_reads": unseen, "origin_bytes": 1000}
    found = of_all_opens(counters)
    assert found == {"hit_ratio": pytest.approx(ratio), "origin_bytes_per_open": pytest.approx(bytes_per_open)}


class Link(NamedTuple):
    url: str
    up: bool


@dataclass(frozen=True)
class Status:
    links: tuple[Link, ...]
    share: float
    counts: Counter[str]
    place: Path
    job: str | None = None


def test_a_status_of_any_kind_is_plain() -> None:
    status = Status((Link("http://n1", True),), 1 / 3, Counter("aab"), Path("/tmp"))
    assert plain({"some": status}) == {
        "some": {
            "links": [{"url": "http://n1", "up": True}],
            "share": 0.333333,
            "counts": {"a": 2, "b": 1},
            "place": "/tmp",
            "job": None,
        }
    }
