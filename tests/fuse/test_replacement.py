"""Files that are replaced by rename while several workers serve them: readers get old bytes or new ones, no errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from mounting import mounted
from replacing import read_on, replaced

NAMES = [f"sample {number}" for number in range(12)]


@pytest.mark.parametrize(
    ("workers", "options"),
    [(2, {"ttl": "0s"}), (3, {}), (1, {"ttl": "0s"})],
)
def test_a_file_that_is_replaced_all_the_time_is_read_without_errors(
    tmp_path: Path, workers: int, options: dict[str, object]
) -> None:
    (source := tmp_path / "source").mkdir()
    with (
        mounted(source, tmp_path / "place", workers=workers, **options) as mount,  # type: ignore[arg-type]
        replaced(source, NAMES, most_bytes=60_000, pause_s=0.0005),
    ):
        outcome = read_on(mount.point, NAMES, 60_000, readers=8, reads=250)
        assert not outcome.errors, outcome
        assert not outcome.mixed, outcome
        assert outcome.right == 8 * 250
