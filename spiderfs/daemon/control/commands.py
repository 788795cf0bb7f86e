"""How to act on a write to a control file, and how options change (`LiveOptions`).

A change of options is published first: written to a file that all workers follow and from which a new manager begins.
Then each component of this manager applies it, in a fixed order. If one fails, all of them and the file go back to the
old options. An error or a crash leaves this behind:

    the change cannot be published     nothing has changed
    a component refuses the change     the old options are published again and every component has them again; for a
                                       moment workers may have answered with the new ones
    going back fails as well           `.spiderfs/config` shows the old options, the log says what is behind, and
                                       `settle` tries again every few seconds
    the manager dies before it has     workers and the next manager have the old options
    published the change
    the manager dies later             workers and the next manager have the options that were published last: a new
                                       manager makes every component from them, and sets the faults of the source
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.warmer import Pattern, Warmer
from spiderfs.daemon.training.service import Training
from spiderfs.errors import ConfigError, SpiderfsError
from spiderfs.options.model import Options
from spiderfs.views.tree import Forms

log = logging.getLogger(__name__)

TakeOver = Callable[[Options], None]
"""Lets a component follow new options; if it cannot, it stays as it was and raises. Old options are no error."""


class LiveOptions:
    def __init__(
        self,
        options: Options,
        publish: TakeOver,
        components: Sequence[TakeOver],
        policy_changed: Callable[[], Awaitable[None]],
    ) -> None:
        """`components` take a change over in this order. `policy_changed` comes last, and may take seconds."""
        self.current, self._publish, self._components = options, publish, components
        self._policy_changed = policy_changed
        self._changing = trio.Lock()
        self._is_behind = False

    async def change(self, settings: Iterable[tuple[str, str]]) -> None:
        """Change options; raises SpiderfsError, and then nothing has changed but what a smaller capacity evicted."""
        async with self._changing:
            before = after = self.current
            for name, value in settings:
                after = after.changed(name, value)
            self._publish(after)
            try:
                for take_over in self._components:
                    take_over(after)
                if after.policy != before.policy:
                    await self._policy_changed()
            except Exception:
                await self._go_back(before, after.policy != before.policy)
                raise
            self.current = after

    async def settle(self) -> None:
        """Try again to go back, if that has failed. Call this regularly."""
        if self._is_behind:
            async with self._changing:
                await self._go_back(self.current, policy_has_changed=True)

    async def _go_back(self, options: Options, policy_has_changed: bool) -> None:
        """Publish these options, and let every component have them, as far as that is possible now."""
        failed: list[str] = []
        for take_over in (self._publish, *self._components):
            try:
                take_over(options)
            except (SpiderfsError, OSError) as exc:
                failed.append(str(exc))
        if policy_has_changed:
            try:
                await self._policy_changed()
            except (SpiderfsError, OSError) as exc:
                failed.append(str(exc))
        self._is_behind = bool(failed)
        if failed:
            log.error(
                "a change of options cannot be taken back yet (%s): free the disk of the cache", "; ".join(failed)
            )


async def change_config(options: LiveOptions, text: bytes) -> None:
    """Change the options that the lines `name=value` set."""
    settings = []
    for line in text.decode(errors="surrogateescape").splitlines():
        setting = line.partition("#")[0].strip()
        if not setting:
            continue
        name, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting}: write name=value, for example capacity=10GiB")
        settings.append((name.strip(), value.strip()))
    await options.change(settings)


OF_FILES = ("warm", "pin", "unpin", "evict")
"""The control files by which the user names files to act on."""


async def act_on_files(
    name: str, warmer: Warmer, cache: CacheControl, options: Options, forms: Forms, text: bytes
) -> None:
    """Do with the files that the lines name what the control file is for; `warm` without lines ends what is fetched."""
    mountpoint = os.fsencode(options.mountpoint)
    patterns = [Pattern(line, mountpoint, forms.linked) for line in text.split(b"\n") if line]
    if not patterns and name != "warm":
        raise ConfigError("no path: write one path or glob a line")
    match name:
        case "warm" if not patterns:
            warmer.stop()
        case "warm":
            warmer.warm(patterns)
        case "pin":
            warmer.warm(patterns, cache)
        case "unpin":
            await warmer.unpin(patterns, cache)
        case "evict":
            await warmer.evict(patterns, cache.evict)


async def pin_ratio(training: Training, text: bytes) -> None:
    """Fix the share of the importance section, or let training decide it again."""
    word = text.decode(errors="replace").strip()
    try:
        ratio = None if word == "auto" else float(word)
    except ValueError as exc:
        raise ConfigError(f"ratio: {word}: write a share from 0 to 1, or auto") from exc
    training.pin_ratio(ratio)
