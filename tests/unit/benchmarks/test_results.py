"""How benchmarks keep their results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common import code_behind
from benchmarks.common.results import save

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def test_a_result_has_a_line_for_each_run(tmp_path: Path) -> None:
    result = {"machine": {"cores": 2, "load": [1.0, 2.0]}, "runs": [{"of": "a", "s": [1, [2]]}, {"of": "b", "s": []}]}
    save(tmp_path / "r.json", result)
    written = (tmp_path / "r.json").read_text()
    assert json.loads(written) == result
    assert '  {"of": "a", "s": [1, [2]]},\n  {"of": "b", "s": []}\n' in written


def test_the_kept_results_are_short_enough_to_be_read() -> None:
    assert sum(len(path.read_text().splitlines()) for path in RESULTS.glob("*.json")) <= 2250


def test_each_kept_result_has_code_that_decides_it() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == set(code_behind.DECIDED_BY)
    for places in code_behind.DECIDED_BY.values():
        assert all((code_behind.ROOT / place).exists() for place in places)


def test_the_hash_of_code_changes_with_what_the_code_does_alone(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    module = tmp_path / "room" / "module.py"
    module.write_text('"""Words."""\nimport os\ndef f(x):\n    """Words."""\n    return x + 1  # why\n')
    before = code_behind.hash_of(["room"], tmp_path)
    module.write_text('import sys\ndef f(x):\n    """Other words."""\n    return x + 1\n')
    module.rename(tmp_path / "room" / "renamed.py")
    assert code_behind.hash_of(["room"], tmp_path) == before
    (tmp_path / "room" / "renamed.py").write_text("def f(x):\n    return x + 2\n")
    assert code_behind.hash_of(["room"], tmp_path) != before


def test_a_result_that_goes_on_names_the_code_of_all_its_runs(tmp_path: Path) -> None:
    path = tmp_path / "scorer.json"
    now = code_behind.hash_of(code_behind.DECIDED_BY["scorer"])
    old = {"runs": [{"us": 1}], "code": [{"commit": "a", "hash": "of-older-code"}]}
    path.write_text(json.dumps(old))
    assert "**out of date**" in code_behind.state_of(path)
    save(path, {"runs": [{"us": 1}, {"us": 2}]})
    assert [code["hash"] for code in json.loads(path.read_text())["code"]] == ["of-older-code", now]
    assert "**out of date**" in code_behind.state_of(path)
    save(path, {"runs": [{"us": 3}]})
    assert code_behind.state_of(path) == "current"
    path.write_text(json.dumps({"runs": [{"us": 1}]}))
    assert code_behind.state_of(path).startswith("not known")
    save(path, {"runs": [{"us": 1}, {"us": 2}]})
    assert code_behind.state_of(path).startswith("not known")
