"""The callbacks without the packages that they are for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer_hook import hugging_face_callback


def test_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="none of these packages is installed: transformers"):
        hugging_face_callback(tmp_path)
