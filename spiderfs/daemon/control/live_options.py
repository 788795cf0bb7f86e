"""The options of a mount as they are now, and the one way to change them while it is mounted.

A change is published first: written to a file that all workers follow and from which a new manager begins. Then each
component of this manager takes it over, in a fixed order. If one of them cannot, all of them and the file go back to
the old options.

An error or a crash leaves this behind:

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
from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from spiderfs.errors import SpiderfsError
from spiderfs.options.model import Options

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
        self.current = options
        self._publish = publish
        self._components = components
        self._policy_changed = policy_changed
        self._changing = trio.Lock()
        self._is_behind = False

    async def change(self, settings: Iterable[tuple[str, str]]) -> None:
        """Change options by their names; raises SpiderfsError where that cannot be done, and then nothing has changed.

        Samples that were evicted for a smaller capacity stay evicted even so.
        """
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
