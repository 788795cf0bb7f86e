"""A test of one thing as a single test of many things, for rules that hold for every file or line of the repository."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def for_all(
    things: Iterable[Any], name: Callable[..., str] = str
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Run the test for each thing, a tuple for several arguments; it fails with the names of all that failed."""

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        def of_all() -> None:
            count, failed = 0, []
            for thing in things:
                arguments = thing if isinstance(thing, tuple) else (thing,)
                count += 1
                try:
                    test(*arguments)
                except Exception as exc:
                    failed.append(f"{name(*arguments)}: {exc or type(exc).__name__}")
            assert count, "there is nothing to test"
            assert not failed, "\n".join(failed)

        of_all.__name__, of_all.__doc__, of_all.__module__ = test.__name__, test.__doc__, test.__module__
        return of_all

    return decorate
