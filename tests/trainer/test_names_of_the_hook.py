"""What `import trainer_hook` offers, what it leaves for later, and what it says of a package that is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trainer_hook


def test_every_name_is_there() -> None:
    assert {name: getattr(trainer_hook, name).__name__ for name in trainer_hook.__all__} == {
        name: name for name in trainer_hook.__all__
    }
    assert set(trainer_hook.__all__) <= set(dir(trainer_hook))
    assert not hasattr(trainer_hook, "nothing")


def test_the_client_does_without_torch_and_the_hook_without_the_daemon() -> None:
    script = """
import sys
from trainer_hook import HookClient, Declaration
assert "torch" not in sys.modules
from trainer_hook import attach
assert "torch" in sys.modules
protocol = {"spiderfs.protocol", *(f"spiderfs.protocol.{name}" for name in ("extents", "reads", "requests"))}
ours = {name for name in sys.modules if name.startswith("spiderfs")}
assert ours == {"spiderfs", "spiderfs.errors"} | protocol, ours
assert not {"trio", "lmdb", "pydantic", "prometheus_client", "xxhash", "click"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_what_needs_torch_says_so_where_it_is_missing() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from trainer_hook import HookClient; from trainer_hook import attach"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    said = done.stderr.splitlines()[-1]
    assert said == (
        "ModuleNotFoundError: trainer_hook.attach needs torch: run `pip install '.[hook]'` in a checkout of spiderfs"
    )


def test_a_callback_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="none of these packages is installed: transformers"):
        trainer_hook.hugging_face_callback(tmp_path)
