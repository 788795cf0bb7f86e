"""Which opens the reading process may answer: those of the only handle that the kernel has of a small file."""

from __future__ import annotations

from spiderfs.fuse import wire
from spiderfs.fuse.kernel import PUSHED_BYTES, Handles, OpenDelivery, open_out

INODE, NUMBER, SIZE = 70_001, 12, 2000


def test_the_only_handle_may_be_answered_by_the_reading_process() -> None:
    handles = Handles(sole=True)
    handles.open(INODE)
    delivery = OpenDelivery(handles, INODE, NUMBER)
    assert not delivery.done
    messages = delivery.messages(SIZE)
    assert messages == (wire.store(INODE, SIZE), wire.answered(NUMBER, open_out(INODE)))


def test_no_other_open_may() -> None:
    handles = Handles(sole=True)
    delivery = OpenDelivery(handles, INODE, NUMBER)
    assert delivery.messages(SIZE) is None, "it is not counted"
    handles.open(INODE)
    assert delivery.messages(PUSHED_BYTES) is not None
    assert delivery.messages(PUSHED_BYTES + 1) is None, "the kernel would not have asked for so much"
    handles.open(INODE)
    assert delivery.messages(SIZE) is None, "a READ of the other handle may be under way"
    assert not handles.close(INODE)
    assert delivery.messages(SIZE) is not None
    assert handles.close(INODE)


def test_of_several_workers_none_knows_what_the_kernel_has_open() -> None:
    handles = Handles(sole=False)
    handles.open(INODE)
    assert OpenDelivery(handles, INODE, NUMBER).messages(SIZE) is None
    assert not handles.close(INODE)
