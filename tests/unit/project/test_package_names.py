"""What messages tell users to install: the checkout, because the name on the package index is not ours."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_no_message_names_a_package_of_the_index() -> None:
    files = [path for room in ("spiderfs", "trainer_hook", "scripts") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 100
    named = [path for path in files if re.search(r"install [\"'`]*spiderfs", path.read_text())]
    assert named == []
