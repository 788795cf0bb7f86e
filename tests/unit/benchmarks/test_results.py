"""How benchmarks keep their results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common.results import save

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def test_a_result_has_a_line_for_each_run(tmp_path: Path) -> None:
    result = {"machine": {"cores": 2, "load": [1.0, 2.0]}, "runs": [{"of": "a", "s": [1, [2]]}, {"of": "b", "s": []}]}
    save(tmp_path / "r.json", result)
    written = (tmp_path / "r.json").read_text()
    assert json.loads(written) == result
    assert '  {"of": "a", "s": [1, [2]]},\n  {"of": "b", "s": []}\n' in written


def test_the_kept_results_are_short_enough_to_be_read() -> None:
    assert sum(len(path.read_text().splitlines()) for path in RESULTS.glob("*.json")) <= 2300
