"""What workers say of how the kernel is to use names."""

from __future__ import annotations

import os

from spiderfs.vfs.redirects import NamesAsked


def test_other_processes_see_what_each_worker_has_said() -> None:
    asked = NamesAsked(2)
    assert not asked.by_all()
    asked.set(0, True)
    assert (asked.by(0), asked.by(1), asked.by_all()) == (True, False, False)
    pid = os.fork()
    if not pid:
        asked.set(1, True)
        os._exit(0)
    os.waitpid(pid, 0)
    assert asked.by_all()
    asked.set(0, False)
    assert not asked.by_all()
