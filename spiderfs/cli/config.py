"""`spiderfs config`: shows the options of a mount and changes those that can be changed while it is mounted."""

from __future__ import annotations

import errno

import click

from spiderfs.cli.control_files import find_mount, read_control, why, write_control
from spiderfs.errors import ConfigError


@click.command()
@click.argument("mountpoint")
@click.argument("changes", metavar="[NAME=VALUE]...", nargs=-1)
def config(mountpoint: str, changes: tuple[str, ...]) -> None:
    """Show the options of the mount at MOUNTPOINT, or change them: capacity=10GiB, policy=lru, ..."""
    from spiderfs.options.model import check_change

    mount = find_mount(mountpoint)
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"{change}: write a change like {name}=VALUE")
        # A refused write answers with an error number only; the reason is found here, by the rules of the daemon.
        check_change(name, value)
    try:
        for change in changes:
            write_control(mount, "config", f"{change}\n")
        if not changes:
            click.echo(read_control(mount, "config"), nl=False)
    except OSError as exc:
        if exc.errno == errno.EINVAL:
            raise ConfigError(f"{change} is refused by the daemon: its log says why") from exc
        raise why(mount, exc) from exc
