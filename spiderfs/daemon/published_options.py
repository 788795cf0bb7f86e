"""The options of a mount as its processes share them: one file that the manager writes and the workers follow."""

from __future__ import annotations

import errno
import json
import logging
import os

from spiderfs.errors import SpiderfsError
from spiderfs.linux import steady_clock
from spiderfs.options.model import Options
from spiderfs.shared.layout import RunLayout
from spiderfs.shared.published import Terms, pid_namespace
from spiderfs.vfs.rules import FOREVER_S, Ownership, Settings

log = logging.getLogger(__name__)


def publish_options(run: RunLayout, options: Options) -> None:
    """Write the options where all processes of the mount look for them; raises SpiderfsError if that fails."""
    text = json.dumps({row.name: row.value for row in options.as_table()})
    temporary = run.options.with_suffix(".new")
    try:
        try:
            temporary.write_text(text)
            temporary.rename(run.options)
        except OSError:
            temporary.unlink(missing_ok=True)
            if not run.options.exists():
                raise
            # On a full disk the user may be lowering the capacity, so this must succeed: the old file has its block.
            with open(run.options, "r+b", buffering=0) as file:
                padded = text.encode().ljust(run.options.stat().st_size)
                if file.write(padded) < len(padded):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
    except OSError as exc:
        raise SpiderfsError(f"the options cannot be written to {run.directory} ({exc.strerror})") from exc


def published_options(run: RunLayout, options: Options) -> Options:
    """`options`, brought up to what was published last; unchanged if the file has gone with the cache directory."""
    try:
        values = json.loads(run.options.read_text())
    except (OSError, ValueError) as exc:
        log.warning("the options changed while mounted are lost (%s): set them again with spiderfs config", exc)
        return options
    for row in options.as_table():
        if row.live and values[row.name] != row.value:
            options = options.changed(row.name, values[row.name])
    return options


def settings_of(options: Options, mounted_at_s: float) -> Settings:
    """The part of the options that requests of the kernel depend on."""
    return Settings(
        # For good, since the mount began: files may have changed between this mount and an earlier one.
        ttl_s=FOREVER_S if options.immutable else options.ttl,
        checked_since_s=mounted_at_s if options.immutable else 0.0,
        negative_ttl_s=min(options.negative_ttl, FOREVER_S),
        dir_ttl_s=min(options.dir_ttl, FOREVER_S),
        sample_max_bytes=options.sample_max_bytes,
        wait_for_fetches=options.substitute_when == "late",
        ownership=Ownership(options.uid, options.gid, options.file_mode, options.dir_mode),
        checks_permissions=options.allow_other or options.immutable,
    )


def client_terms_of(options: Options, mounted_at_s: float) -> Terms:
    """The part of the options that readers around FUSE depend on."""
    settings = settings_of(options, mounted_at_s)
    return Terms(
        ttl_s=settings.ttl_s,
        checked_since_s=settings.checked_since_s,
        clock_began_s=steady_clock.BEGAN_S,
        sample_max_bytes=settings.sample_max_bytes,
        wait_for_fetches=settings.wait_for_fetches,
        substitute=options.substitute,
        checks_permissions=settings.checks_permissions,
        pushes_ahead=options.immutable,
        pid_namespace=pid_namespace(),
        **settings.ownership._asdict(),
    )
