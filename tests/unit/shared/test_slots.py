"""What one process says of numbers, all processes of a mount know."""

from __future__ import annotations

import os

from spiderfs.shared.shared_memory import SharedSlots


def test_a_forked_process_knows_what_was_added_later() -> None:
    pushed = SharedSlots(1 << 16)
    pid = os.fork()
    if pid == 0:
        pushed.put(1 << 63 | 5)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert 1 << 63 | 5 in pushed
    assert 5 not in pushed
    pushed.discard(5)
    assert 1 << 63 | 5 in pushed, "of two in one slot, the other one"
    pushed.discard(1 << 63 | 5)
    assert 1 << 63 | 5 not in pushed
    pushed.put(7)
    pushed.replace(())
    assert 7 not in pushed


def test_other_processes_see_what_each_worker_has_said() -> None:
    workers = (1, 2)
    asked = SharedSlots(len(workers))
    assert not any(worker in asked for worker in workers)
    asked.put(1)
    assert (1 in asked, 2 in asked) == (True, False)
    pid = os.fork()
    if not pid:
        asked.put(2)
        os._exit(0)
    os.waitpid(pid, 0)
    assert all(worker in asked for worker in workers)
    asked.discard(1)
    assert (1 in asked, 2 in asked) == (False, True)


def test_a_number_has_what_was_said_of_it_last() -> None:
    slots = SharedSlots(8, "Qd")
    assert slots.get(3) is None
    slots.put(3, 7, 0.5)
    slots.put(3, 8, 1.5)
    assert slots.get(3) == (8, 1.5)
    assert slots.get(11) is None
    slots.put(11, 9, 2.5)
    assert (slots.get(3), slots.get(11)) == (None, (9, 2.5))
    slots.discard(3)
    assert 11 in slots
    slots.discard(11)
    assert slots.get(11) is None
