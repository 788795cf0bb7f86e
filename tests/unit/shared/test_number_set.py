"""What one process says of a set of numbers, all processes of a mount know."""

from __future__ import annotations

import os

from spiderfs.shared.number_set import SharedNumbers


def test_a_forked_process_knows_what_was_added_later() -> None:
    pushed = SharedNumbers(1 << 16)
    pid = os.fork()
    if pid == 0:
        pushed.add(1 << 63 | 5)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert 1 << 63 | 5 in pushed
    assert 5 not in pushed
    pushed.discard(5)
    assert 1 << 63 | 5 in pushed, "of two in one slot, the other one"
    pushed.discard(1 << 63 | 5)
    assert 1 << 63 | 5 not in pushed
    pushed.add(7)
    pushed.replace(())
    assert 7 not in pushed
