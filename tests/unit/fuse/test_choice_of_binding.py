"""Choosing what speaks to the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spiderfs.errors import MountError
from spiderfs.fuse import session
from spiderfs.fuse.bindings import BINDINGS, mount
from spiderfs.options.model import Options


def test_every_binding_of_the_option_can_be_made() -> None:
    assert set(BINDINGS) == set(Options.model_fields["binding"].annotation.__args__)  # type: ignore[union-attr]


def test_without_pyfuse3_a_sentence_says_why_nothing_is_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyfuse3", None)
    monkeypatch.delitem(sys.modules, "spiderfs.fuse.pyfuse3_binding", raising=False)
    monkeypatch.setattr(session, "mount", lambda *arguments: pytest.fail("mounted"))
    with pytest.raises(MountError, match=r"\[pyfuse3\]'` in a checkout of spiderfs, or mount with -o binding=kernel$"):
        mount("pyfuse3", tmp_path, "source", allow_other=False, programs_run=True)


def test_the_daemon_does_not_load_pyfuse3_unasked() -> None:
    text = "import spiderfs.daemon.supervisor, sys; sys.exit('pyfuse3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], timeout=60).returncode == 0
