"""The benchmark of new worths ends, and by then each worth has been told."""

from __future__ import annotations

import pytest

from benchmarks.engine import worths


@pytest.mark.parametrize("policy", worths.GUIDED)
def test_every_worth_is_passed_on_while_times_are_taken(policy: str) -> None:
    learned = worths.FilledPolicy(policy, 3 * worths.BATCH)
    first, *_ = learned.scores("second", 2)
    row = learned.row("a second one scores", [first])
    assert 0 < row.stall_s <= row.total_s
    assert list(learned.feed._worths.due(1)) == []
