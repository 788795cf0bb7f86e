"""The pool of makers: killed, slow and starved makers cost nothing but their work."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from image_files import image_file, opened, picture

from spiderfs.views import tree as pool_module
from spiderfs.views.making import make
from spiderfs.views.recipe import Recipe, Unmade
from spiderfs.views.tree import MakerLost, MakerPool, Starved, TakesTooLong

RECIPE = Recipe("jpeg", 64, 90)
MOST = 50_000_000
LONGEST = 2 << 20


@pytest.fixture
def pool() -> Iterator[MakerPool]:
    pool = MakerPool(2, LONGEST, MOST)
    yield pool
    pool.close()


def pids(pool: MakerPool) -> list[int]:
    """The makers that wait for work."""
    return [maker.pid for maker in pool._idle]


def test_a_maker_makes_what_the_function_makes(pool: MakerPool) -> None:
    for seed in range(3):
        content = image_file(image=picture(seed=seed))
        assert pool.make(content, RECIPE) == make(content, RECIPE, MOST)
    assert pool.make(b"no image", RECIPE) is Unmade.NO_IMAGE
    assert len(pids(pool)) == 1


def test_makers_run_at_the_lowest_priority_within_their_memory(pool: MakerPool) -> None:
    pool.make(image_file(), RECIPE)
    (pid,) = pids(pool)
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    with open(f"/proc/{pid}/limits", encoding="ascii") as limits:
        assert any(line.startswith("Max address space") and "unlimited" not in line for line in limits)


def test_a_killed_maker_is_replaced(pool: MakerPool) -> None:
    content = image_file()
    view = pool.make(content, RECIPE)
    (pid,) = pids(pool)
    os.kill(pid, signal.SIGKILL)
    assert pool.make(content, RECIPE) == view
    assert pids(pool) != [pid]


def test_a_stopped_maker_is_given_up_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MakerPool(1, LONGEST, MOST)
    try:
        content = image_file()
        view = pool.make(content, RECIPE)
        (pid,) = pids(pool)
        os.kill(pid, signal.SIGSTOP)
        # Before it has stopped it waits for a processor, which is none of its own fault.
        os.waitpid(pid, os.WUNTRACED)
        pool._patience_s = 0.2
        began = threading.Timer(0.1, setattr, (pool, "_patience_s", 10.0))
        began.start()
        # The second maker has to start within the patience, so only the first attempt has the short one.
        made = [pool.make(content, RECIPE)] if _second_is_patient(pool, monkeypatch) else []
        assert made == [view]
        assert pids(pool) != [pid]
    finally:
        pool.close()


def _second_is_patient(pool: MakerPool, monkeypatch: pytest.MonkeyPatch) -> bool:
    new = pool_module._Maker

    def patient(*room: int):  # type: ignore[no-untyped-def]
        pool._patience_s = 10.0
        maker = new(*room)
        make = maker.make
        maker.make = lambda original, recipe, _, give_way: make(original, recipe, 10.0, give_way)  # type: ignore[method-assign]
        return maker

    monkeypatch.setattr(pool_module, "_Maker", patient)
    return True


def test_two_makers_that_do_not_answer_are_an_error() -> None:
    pool = MakerPool(1, LONGEST, MOST, patience_s=0.0)
    try:
        with pytest.raises(MakerLost, match=r"did not answer within 0\.\d s"):
            pool.make(image_file(), RECIPE)
        assert pids(pool) == []
    finally:
        pool.close()


def test_an_image_that_takes_too_long_holds_up_the_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A progressive JPEG whose last scan comes thousands of times: each takes as long as the whole image."""
    # Makers have the lowest priority, so beside other tests one gets little of a core.
    monkeypatch.setattr(pool_module, "_BUSY_SHARE", 1e-4)
    once = image_file(image=picture(4000, 4000), quality=30, progressive=True)
    last, end = once.rfind(b"\xff\xda"), once.rfind(b"\xff\xd9")
    slow = once[:end] + once[last:end] * ((LONGEST - end) // (end - last) - 1) + once[end:]
    pool = MakerPool(1, LONGEST, MOST)
    try:
        content = image_file()
        view = pool.make(content, RECIPE)
        (first,) = pids(pool)
        pool._patience_s = 0.5
        with pytest.raises(
            TakesTooLong, match=r"did not answer within (0\.[5-9]|[1-9]\.\d) s, \d\.\d of them busy"
        ) as once:
            pool.make(slow, RECIPE)
        assert pids(pool) == [], "no second maker has tried"
        pool._patience_s = 10.0
        assert pool.make(content, RECIPE) == view
        (second,) = pids(pool)
        with pytest.raises(TakesTooLong, match=re.escape(str(once.value))):
            pool.make(slow, RECIPE)
        assert pids(pool) == [second] != [first]
    finally:
        pool.close()


def test_an_image_that_takes_more_than_a_moment_makes_way_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [image_file(image=picture(seed=seed)) for seed in range(3)]
    views = [make(content, RECIPE, MOST) for content in contents]
    pool = MakerPool(1, LONGEST, MOST, patience_s=60.0)
    try:
        assert pool.make(contents[0], RECIPE) == views[0]
        (stopped,) = pids(pool)
        os.kill(stopped, signal.SIGSTOP)
        monkeypatch.setattr(pool_module, "_MOMENT_S", 0.05)
        made: list[object] = []
        slow = threading.Thread(target=lambda: made.append(pool.make(contents[1], RECIPE)))
        slow.start()
        deadline = time.monotonic() + 30.0
        while pids(pool) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert pool.make(contents[2], RECIPE) == views[2]
        assert slow.is_alive()
        os.kill(stopped, signal.SIGKILL)
        slow.join()
        assert made == [views[1]]
        assert len(pids(pool)) == 1, "no more makers wait than there are when no image takes long"
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("passed_s", "busy_s", "waited_s", "error"),
    [
        (9.9, 9.0, 0.0, None),
        (10.0, 0.1, 0.2, MakerLost),
        (10.0, 6.0, 0.0, TakesTooLong),
        (10.0, 0.1, 9.0, None),
        (19.0, 0.1, 18.0, None),
        (19.0, 6.0, 13.0, TakesTooLong),
        (20.0, 0.1, 19.0, Starved),
    ],
)
def test_a_maker_that_others_keep_from_the_processor_has_the_time_of_both_tries(
    passed_s: float, busy_s: float, waited_s: float, error: type[MakerLost] | None
) -> None:
    maker = object.__new__(pool_module._Maker)
    maker._times = lambda: (1.0 + busy_s, 2.0 + waited_s)  # type: ignore[method-assign]
    try:
        maker._check_time(passed_s, 10.0, (1.0, 2.0))
        raised = None
    except MakerLost as exc:
        raised = type(exc)
    assert raised is error


def test_threads_share_the_makers(pool: MakerPool) -> None:
    contents = [image_file(image=picture(seed=seed)) for seed in range(12)]
    made: dict[int, object] = {}

    def work(number: int) -> None:
        made[number] = pool.make(contents[number], RECIPE)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(contents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == {number: make(content, RECIPE, MOST) for number, content in enumerate(contents)}
    assert 1 <= len(pids(pool)) <= 2


def test_a_view_longer_than_a_file_may_be_is_none() -> None:
    pool = MakerPool(1, 1 << 20, MOST)
    try:
        original = image_file(image=picture(1200, 1200), quality=50)
        assert len(original) < 1 << 20
        assert pool.make(original, Recipe("npy", 4000)) is Unmade.MEMORY
    finally:
        pool.close()


def test_an_image_as_large_as_is_allowed_is_made(pool: MakerPool) -> None:
    content = image_file(image=picture(8000, 6200), quality=30)
    assert len(content) < LONGEST
    view = pool.make(content, RECIPE)
    assert isinstance(view, bytes)
    assert opened(view).size == (83, 64)
    content = image_file("PNG", image=picture(16, 16).resize((7000, 7000), 0), compress_level=9)
    assert isinstance(pool.make(content, RECIPE), bytes)
