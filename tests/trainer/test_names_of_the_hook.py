"""What `import trainer_hook` offers, and what it leaves for later."""

from __future__ import annotations

import subprocess
import sys

import trainer_hook


def test_every_name_is_there() -> None:
    assert {name: getattr(trainer_hook, name).__name__ for name in trainer_hook.__all__} == {
        name: name for name in trainer_hook.__all__
    }
    assert set(trainer_hook.__all__) <= set(dir(trainer_hook))
    assert not hasattr(trainer_hook, "nothing")


def test_the_client_does_without_torch() -> None:
    script = (
        "import sys; from trainer_hook import HookClient, Declaration; assert 'torch' not in sys.modules;"
        "from trainer_hook import attach; assert 'torch' in sys.modules"
    )
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
