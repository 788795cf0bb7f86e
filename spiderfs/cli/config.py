"""`spiderfs config`: shows the options of a mount and changes those that can be changed while mounted."""

from __future__ import annotations

import errno
from pathlib import Path

import click

from spiderfs.cli.control_files import explained, find_mount, mountpoints, read_control, read_stats, warn, write_control
from spiderfs.errors import ConfigError


@click.command()
@click.argument("mountpoint", shell_complete=mountpoints)
@click.argument("changes", metavar="[NAME=VALUE]...", nargs=-1)
def config(mountpoint: str, changes: tuple[str, ...]) -> None:
    """Show the options of the mount at MOUNTPOINT, or change them: capacity=10GiB, policy=lru, ..."""
    from spiderfs.options.model import Capacity, check_change
    from spiderfs.options.paths import capacity_remark

    mount = find_mount(mountpoint)
    for change in changes:
        name, equals, value = (part.strip() for part in change.partition("="))
        if not equals:
            raise ConfigError(f"{change}: write a change like {name}=VALUE")
        # If the daemon refuses the write, it can answer with an error number only. So the same check runs here first,
        # which has a reason to show.
        check_change(name, value)
    try:
        for change in changes:
            write_control(mount, "config", f"{change}\n")
            name, _, value = change.partition("=")
            if name.strip() == "capacity":
                warn(capacity_remark(Capacity.parse(value), Path(read_stats(mount)["cache_dir"])))
        text = "" if changes else read_control(mount, "config")
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise ConfigError(f"the daemon refused {change}: see its log for the reason") from exc
        raise explained(mount, exc) from exc
    click.echo(text, nl=False)
