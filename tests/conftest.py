"""Which binding to the kernel the mounts of a test have, and which mode; `import mounting` works in every test.

In opened mode the kernel asks the mount for each open; in immutable mode (`-o immutable`) it does not. A module or test
marked `both_bindings` runs once over each binding, in opened mode. One marked `opened_and_immutable` runs once more in
immutable mode, over the kernel's own protocol. Of such a module, tests marked `not_immutable` do not run in immutable
mode, and the marker says why. Single parameters of a test can be marked so too. Nothing runs over pyfuse3 again only
to have more workers.

CONTRIBUTING.md says what is tested over pyfuse3, and names the few modules that run in both modes.

trio runs tests that are `async def`, by the clock of a fixture that returns one, and within the asynchronous context
managers that fixtures return: what such a context yields is the argument.

Without `--all` runs a choice of what costs most, in which each kind occurs: no tests marked `thorough`, each test of
`ONE_WAY` in one mode and with one number of workers, and half of Hypothesis' examples.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import re
import signal
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import mounting
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, settings
from programs import not_ignoring_interrupts

# A busy machine draws slowly.
settings.register_profile("tests", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

not_ignoring_interrupts()

# These run where someone has installed the stores (`real_stores.py`) and says so; then one that is missing fails.
collect_ignore = [] if os.environ.get("SPIDERFS_REAL_STORES") else ["contract/test_real_stores.py"]

BINDINGS = ("kernel", "pyfuse3")
# In place of a binding: the kernel's own protocol, immutable.
IMMUTABLE = "immutable"
# Folders and kinds of subjects that are left out with --fast.
SLOW_FOLDERS = ("tests/unit/benchmarks", "tests/unit/project")
FAST_SUBJECTS = ("memory", "lmdb")
# Where a test runs in one mode and with one number of workers, unless all is asked for: of the tests with trainers, in
# those files where the parameters below do not count the workers of a loader.
ONE_WAY = (
    "tests/fault/",
    "tests/fuse/",
    "tests/trainer/test_archive_training.py",
    "tests/trainer/test_learned_ranges.py",
    "tests/trainer/test_plan_mount.py",
    "tests/trainer/test_planned_batches.py",
    "tests/trainer/test_repeated_decisions.py",
    "tests/trainer/test_spider_mount.py",
    "tests/trainer/test_training.py",
)
# The parameters that say which; `mount` is a number of workers or a mode.
WAYS = ("binding", "workers", "mount", "mode", "immutable")
# How long a test that is a coroutine may take.
TEST_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what takes long and is much like what runs without it")
    parser.addoption("--fast", action="store_true", help="without mounts, and with fewer made-up examples")


def pytest_configure(config: pytest.Config) -> None:
    # xdist would begin with the files of the most tests. Files of real mounts have few tests and long ones: at the
    # end one process would wait for the other. By their names they come before the many short tests of units.
    config.option.loadscopereorder = False
    if config.option.fast:
        settings.register_profile("fast", max_examples=20, stateful_step_count=20)
        settings.load_profile("fast")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = metafunc.definition.get_closest_marker
    kinds = ["kernel"]
    if marked("both_bindings"):
        kinds = [*BINDINGS]
    if marked("opened_and_immutable") and not marked("not_immutable"):
        kinds.append(IMMUTABLE)
    if len(kinds) > 1:
        metafunc.parametrize("binding", kinds, indirect=True, scope="module")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {item for item in items if _is_left_out(item) or (config.option.fast and _is_slow(item))}
    if not config.option.all:
        left_out |= {item for item in items if item.get_closest_marker("thorough")}
        left_out |= _other_ways([item for item in items if item not in left_out])
        halved = set[object]()
        for item in items:
            _halve_examples(item, halved)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _is_left_out(item: pytest.Item) -> bool:
    """Whether a marked parameter keeps a test from running so, or it would run over pyfuse3 with several workers."""
    parameters = _parameters(item)
    binding, options = parameters.get("binding", "kernel"), parameters.get("options")
    wanted = [parameters.get(name) for name in ("workers", "mount", "lasting")]
    wanted += [options.get("workers")] if isinstance(options, dict) else []
    several = any(isinstance(count, int) and count > 1 for count in wanted)
    left_out = {"pyfuse3": several, IMMUTABLE: item.get_closest_marker("not_immutable") is not None}
    return left_out.get(binding, False)


def _is_slow(item: pytest.Item) -> bool:
    """Whether a test mounts, or is of a folder whose tests take long; a test says by its marker `slow` that it does."""
    mounts = item.path.name == "test_filesystem_cases.py" and _parameters(item).get("kind") not in FAST_SUBJECTS
    return mounts or item.nodeid.startswith(SLOW_FOLDERS) or item.get_closest_marker("slow") is not None


def _other_ways(items: list[pytest.Item]) -> set[pytest.Item]:
    """The items that differ from another one in nothing but the way in which it runs.

    Which one stays follows from the test's name, so that over all tests each way occurs.
    """
    ways: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(ONE_WAY):
            others = {name: str(value) for name, value in _parameters(item).items() if name not in WAYS}
            # All processes of xdist choose alike: addresses of functions differ.
            named = re.sub(r" at 0x[0-9a-f]+", "", str(others))
            ways.setdefault(f"{item.nodeid.partition('[')[0]} {named}", []).append(item)
    return {
        item
        for name, same in ways.items()
        for number, item in enumerate(sorted(same, key=lambda item: item.nodeid))
        if number != zlib.crc32(name.encode()) % len(same)
    }


def _halve_examples(item: pytest.Item, halved: set[object]) -> None:
    """Have Hypothesis make half of the examples, of a test or of a state machine; once, however many items it has."""
    function = getattr(item, "obj", None)
    # A test of a class is bound to an instance that each item has for itself.
    function = getattr(function, "__func__", function)
    for owner, name in ((getattr(item, "cls", None), "settings"), (function, "_hypothesis_internal_use_settings")):
        if owner not in halved and isinstance(found := getattr(owner, name, None), settings):
            halved.add(owner)
            setattr(owner, name, _halved(found))


def _halved(whole: settings) -> settings:
    return settings(whole, max_examples=max(1, whole.max_examples // 2))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine with Trio, for a minute at most, by the clock that is one of its fixtures.

    A fixture may give an async context manager: the test runs in it, and is given what it yields.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    clock = next((value for value in pyfuncitem.funcargs.values() if isinstance(value, trio.abc.Clock)), None)

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            # A clock that jumps is for tests that wait for longer.
            stack.enter_context(trio.fail_after(TEST_S) if clock is None else contextlib.nullcontext())
            for name, value in given.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    given[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**given)

    with _ends_of_children_unnoticed():
        trio.run(run, clock=clock)
    return True


@contextlib.contextmanager
def _ends_of_children_unnoticed() -> Iterator[None]:
    """torch has SIGCHLD handled for good once a loader has had workers.

    Trio closes the descriptor by which signals wake it up before it says so. A child that ends in between would fail
    the test, since Python cannot write to it.
    """
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


@contextlib.asynccontextmanager
async def _nursery() -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as opened:
        yield opened
        opened.cancel_scope.cancel()


@pytest.fixture
def nursery() -> contextlib.AbstractAsyncContextManager[trio.Nursery]:
    """A nursery for an asynchronous test, which ends all tasks with the test."""
    return _nursery()


@pytest.fixture
def jumping_clock() -> trio.abc.Clock:
    """A clock for an asynchronous test: while all tasks sleep, it jumps to when the first of them wakes."""
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.fixture(scope="module", autouse=True)
def earlier_objects_set_aside() -> None:
    """Set aside for good what earlier modules have left, so that no garbage collection looks through it again.

    With torch imported, and thousands of tests collected, each call of gc.collect took 0.3 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty directory that a test fills and mounts."""
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.fixture(scope="module", autouse=True)
def binding(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `mounting.mounted` mounts with. A fixture that mounts for a whole module asks for this one."""
    mounting.binding = getattr(request, "param", "kernel")
    yield mounting.binding
    mounting.binding = "kernel"
