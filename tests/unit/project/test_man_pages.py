"""The man pages: roff understands them, and they name every command and option."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from spiderfs.cli.main import COMMANDS
from spiderfs.options.model import default_rows

MAN = Path(__file__).parents[3] / "docs" / "man"


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff here")
@pytest.mark.parametrize("page", ["spiderfs.1", "mount.spiderfs.8"])
def test_roff_has_nothing_to_say_of_a_page(page: str) -> None:
    command = ["groff", "-man", "-Tutf8", "-ww", "-P-c", "-rLL=80n", MAN / page]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stderr == ""
    assert "\\" not in shown.stdout


def test_the_pages_name_all_that_there_is() -> None:
    texts = [(MAN / page).read_text().replace("\\-", "-") for page in ("spiderfs.1", "mount.spiderfs.8")]
    for name, command in COMMANDS.items():
        assert not command.short_help or f".SS spiderfs {name} " in texts[0]
    for text in texts:
        assert all(f".B {row.name}=" in text for row in default_rows())
