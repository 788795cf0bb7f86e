"""The forms for issues ask with commands that exist, and have the keys that the tracker needs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from spiderfs.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
FORMS = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_is_whole(form: Path) -> None:
    text = form.read_text()
    content = yaml.safe_load(text)
    assert {"name", "description", "body"} <= content.keys()
    ids = [field["id"] for field in content["body"]]
    assert len(set(ids)) == len(ids)
    assert all(field["type"] in ("textarea", "input") and field["attributes"]["label"] for field in content["body"])
    assert any(field.get("validations", {}).get("required") for field in content["body"])
    assert set(re.findall(r"`spiderfs ([a-z]+)", text)) <= COMMANDS.keys()
    for name in re.findall(r"\b[A-Z]+\.md\b", text):
        assert (ROOT / name).exists()


def test_there_is_a_form_for_bugs_and_one_for_requests() -> None:
    assert [form.stem for form in FORMS] == ["bug", "feature"]
