"""`spiderfs mount-helper`, which mount(8) calls through /sbin/mount.spiderfs for `mount -t spiderfs` and for fstab.

mount(8) calls `mount.TYPE SOURCE DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`, and understands the exit status 32
as "mount failure".
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from spiderfs.cli.control_files import printable
from spiderfs.errors import SpiderfsError
from spiderfs.options.mount_strings import REFUSED_OPTIONS, SETTING_OPTIONS, split_options

MOUNT_FAILURE = 32

# libmount adds `rw` whenever the user has not written `ro`, so `rw` does not mean here that the user asked for it.
OPTIONS_OF_LIBMOUNT = frozenset({"rw"})


def translate(options: Sequence[str], sloppy: bool) -> tuple[str, ...]:
    """mount(8)'s options as `spiderfs mount` takes them; `sloppy` (-s) leaves out those that spiderfs does not know."""
    from spiderfs.options.model import Options, option_name

    chosen = [option for string in options for option in split_options(string) if option not in OPTIONS_OF_LIBMOUNT]
    if sloppy:
        known = {option_name(field) for field in Options.model_fields} | SETTING_OPTIONS.keys() | REFUSED_OPTIONS.keys()
        chosen = [option for option in chosen if option.partition("=")[0].strip() in known]
    return tuple(chosen)


@click.command("mount-helper", hidden=True)
@click.argument("source")
@click.argument("mountpoint")
@click.option("-s", "sloppy", is_flag=True, help="Ignore unknown options.")
@click.option("-f", "fake", is_flag=True, help="Check everything, and mount nothing.")
@click.option("-n", "no_mtab", is_flag=True, help="Has no effect: there is no mtab to write.")
@click.option("-v", "verbose", is_flag=True, help="Print what is mounted.")
@click.option("-N", "namespace", help="Has no effect: mount(8) has already entered the namespace.")
@click.option("-t", "fstype", help="Has no effect: there is only one type.")
@click.option("-o", "options", multiple=True)
@click.pass_context
def mount_helper(
    ctx: click.Context,
    source: str,
    mountpoint: str,
    sloppy: bool,
    fake: bool,
    no_mtab: bool,
    verbose: bool,
    namespace: str | None,
    fstype: str | None,
    options: tuple[str, ...],
) -> None:
    """Mount SOURCE at MOUNTPOINT on behalf of mount(8)."""
    from spiderfs.cli.mount import start

    try:
        failed = start(translate(options, sloppy), None, source, mountpoint, fake=fake) != 0
    except SpiderfsError as exc:
        click.echo(f"spiderfs: {' '.join(str(exc).split())}", err=True)
        failed = True
    if verbose and not failed:
        click.echo(printable(f"spiderfs: {source} mounted on {mountpoint}") + (" (checked only: -f)" if fake else ""))
    ctx.exit(MOUNT_FAILURE if failed else 0)
