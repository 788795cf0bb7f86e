"""What the figures of a mount mean where the page cache answers unseen."""

from __future__ import annotations

import pytest

from spiderfs.daemon.control.status import of_all_opens


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
