"""Changing options while mounted: published first, then taken over, and taken back everywhere if anybody refuses."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio

from spiderfs.daemon.control.commands import LiveOptions
from spiderfs.daemon.published_options import publish_options, published_options
from spiderfs.errors import ConfigError, SpiderfsError, StoreFull
from spiderfs.options.model import Options
from spiderfs.shared.layout import RunLayout


class Component:
    """Follows the options, unless it is told to refuse them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.refusals: list[BaseException] = []

    def change(self, options: Options) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.options = options


class Died(BaseException):
    """The manager ends here, as by SIGKILL."""


class Harness:
    """A manager's live options over a real file, with three components and a policy that wants to be told last."""

    def __init__(self, directory: Path) -> None:
        self.run = RunLayout(directory / "run")
        self.run.directory.mkdir(exist_ok=True)
        self.mounted_with = Options(source=directory, mountpoint=directory / "m", cache_dir=directory / "cache")
        if not self.run.options.exists():
            publish_options(self.run, self.mounted_with)
        options = published_options(self.run, self.mounted_with)
        self.disk = Component(options)
        self.components = [Component(options) for _ in range(3)]
        self.taught_policy = options.policy
        self.feed: list[BaseException] = []
        self.live = LiveOptions(
            options, self._publish, [component.change for component in self.components], self._policy_changed
        )

    def _publish(self, options: Options) -> None:
        self.disk.change(options)
        publish_options(self.run, options)

    async def _policy_changed(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.feed:
            raise self.feed.pop(0)
        self.taught_policy = self.components[0].options.policy

    @property
    def published(self) -> Options:
        """What a worker, or the next manager, takes the options to be."""
        return published_options(self.run, self.mounted_with)

    def everywhere(self) -> set[tuple[str, str]]:
        """Capacity and policy, as everybody knows them."""
        known = [self.live.current, self.published, *(component.options for component in self.components)]
        return {(str(options.capacity), options.policy) for options in known}


CHANGE = [("capacity", "1MiB"), ("policy", "lru")]
OLD, NEW = {("10GiB", "spider")}, {("1MiB", "lru")}


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


@pytest.mark.parametrize("setting", [("workers", "3"), ("capacity", "lots"), ("polcy", "lru")])
async def test_what_is_no_option_changes_nothing(harness: Harness, setting: tuple[str, str]) -> None:
    with pytest.raises(ConfigError):
        await harness.live.change([("capacity", "1MiB"), setting])
    assert harness.everywhere() == OLD


async def test_what_cannot_be_published_changes_nothing(harness: Harness) -> None:
    harness.disk.refusals = [SpiderfsError("no space left")]
    with pytest.raises(SpiderfsError, match="no space left"):
        await harness.live.change(CHANGE)
    assert harness.everywhere() == OLD
    await harness.live.settle()
    await harness.live.change(CHANGE)
    assert harness.everywhere() == NEW


@pytest.mark.parametrize("refusal", [StoreFull("no space left"), RuntimeError("a mistake")])
@pytest.mark.parametrize("refuses", [0, 1, 2, "policy"])
async def test_what_a_component_refuses_is_taken_back_everywhere(
    harness: Harness, refuses: int | str, refusal: Exception
) -> None:
    if isinstance(refuses, int):
        harness.components[refuses].refusals = [refusal]
    else:
        harness.feed = [refusal]
    with pytest.raises(type(refusal)):
        await harness.live.change(CHANGE)
    assert harness.everywhere() == OLD
    assert harness.taught_policy == "spider"
    await harness.live.change(CHANGE)
    assert harness.everywhere() == NEW
    assert harness.taught_policy == "lru"


async def test_going_back_is_tried_again_until_it_succeeds(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        full = StoreFull("no space left")
        # A component refuses the change, and then the disk takes nothing any more.
        harness.components[2].refusals = [full]
        publish = harness._publish
        changed = []

        def publish_once(options: Options) -> None:
            if changed:
                raise SpiderfsError("the options cannot be written")
            changed.append(options)
            publish(options)

        harness.live._publish = publish_once
        with pytest.raises(StoreFull):
            await harness.live.change(CHANGE)
        assert str(harness.live.current.capacity) == "10GiB", "what users are shown"
        assert {str(component.options.capacity) for component in harness.components} == {"10GiB"}
        assert str(harness.published.capacity) == "1MiB"
        await harness.live.settle()
        assert harness.everywhere() == OLD | {("1MiB", "lru")}
        harness.live._publish = publish
        await harness.live.settle()
        assert harness.everywhere() == OLD
    assert [record.getMessage() for record in caplog.records] == [
        "a change of options cannot be taken back yet (the options cannot be written): free the disk of the cache"
    ] * 2


@pytest.mark.parametrize("dies", ["before publishing", 0, 1, 2, "policy"])
async def test_after_a_crash_at_any_point_the_next_manager_agrees_with_the_workers(
    harness: Harness, tmp_path: Path, dies: int | str
) -> None:
    if dies == "before publishing":
        harness.disk.refusals = [Died()]
    elif isinstance(dies, int):
        harness.components[dies].refusals = [Died()]
    else:
        harness.feed = [Died()]
    with pytest.raises(Died):
        await harness.live.change(CHANGE)
    # Workers follow what is published, and the next manager makes all its components from it.
    workers = published_options(harness.run, harness.mounted_with)
    after = Harness(tmp_path)
    assert after.live.current == workers
    assert after.everywhere() == (OLD if dies == "before publishing" else NEW)


async def test_changes_are_made_one_after_the_other(harness: Harness) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(harness.live.change, [("policy", "lru")])
        nursery.start_soon(harness.live.change, [("capacity", "1MiB")])
        nursery.start_soon(harness.live.change, [("policy", "lfu")])
    ((capacity, policy),) = harness.everywhere()
    assert capacity == "1MiB"
    assert policy in ("lru", "lfu")
    assert harness.taught_policy == policy
