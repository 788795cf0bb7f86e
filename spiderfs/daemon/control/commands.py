"""The effects of writing to control files: each command takes the text, and a component that acts on it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from spiderfs.daemon.caching.cache_control import CacheControl
from spiderfs.daemon.caching.patterns import Pattern
from spiderfs.daemon.caching.warmer import Warmer
from spiderfs.daemon.control.live_options import LiveOptions
from spiderfs.daemon.training.service import Training
from spiderfs.errors import ConfigError
from spiderfs.options.model import Options
from spiderfs.views.tree import Forms


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


async def warm(warmer: Warmer, options: Options, forms: Forms, text: bytes) -> None:
    """Begin to fetch the files that the lines name."""
    warmer.warm(_patterns(options, forms, text))


async def evict(warmer: Warmer, cache: CacheControl, options: Options, forms: Forms, text: bytes) -> None:
    """Drop the files that the lines name from the cache."""
    await warmer.evict(_patterns(options, forms, text), cache.evict)


async def pin_ratio(training: Training, text: bytes) -> None:
    """Fix the share of the importance section, or let training decide it again."""
    word = text.decode(errors="replace").strip()
    try:
        ratio = None if word == "auto" else float(word)
    except ValueError as exc:
        raise ConfigError(f"ratio: {word}: write a share from 0 to 1, or auto") from exc
    training.pin_ratio(ratio)


def _patterns(options: Options, forms: Forms, text: bytes) -> Sequence[Pattern]:
    mountpoint = os.fsencode(options.mountpoint)
    patterns = [Pattern(line, mountpoint, forms.linked) for line in text.split(b"\n") if line]
    if not patterns:
        raise ConfigError("no path: write one path or glob a line")
    return patterns
