"""`spiderfs mount-helper`: what mount(8) calls, through /sbin/mount.spiderfs, for `mount -t spiderfs` and fstab lines.

mount(8) promises `mount.TYPE SOURCE DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`, and takes an exit status of 32
for "mount failure".
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from spiderfs.cli.control_files import shown
from spiderfs.errors import SpiderfsError
from spiderfs.options.mount_strings import REFUSED_WORDS, SETTING_WORDS, split_words

MOUNT_FAILURE = 32

# libmount always states `rw` unless told `ro`, so here it does not mean that somebody asked for it.
WORDS_OF_LIBMOUNT = frozenset({"rw"})


def translate(options: Sequence[str], sloppy: bool) -> tuple[str, ...]:
    """mount(8)'s option strings as those of `spiderfs mount`; `sloppy` (-s) leaves out what spiderfs does not know."""
    from spiderfs.options.model import Options, option_name

    words = [word for string in options for word in split_words(string) if word not in WORDS_OF_LIBMOUNT]
    if sloppy:
        known = {option_name(field) for field in Options.model_fields} | SETTING_WORDS.keys() | REFUSED_WORDS.keys()
        words = [word for word in words if word.partition("=")[0] in known]
    return tuple(words)


@click.command("mount-helper", hidden=True)
@click.argument("source")
@click.argument("mountpoint")
@click.option("-s", "sloppy", is_flag=True, help="Leave out unknown options.")
@click.option("-f", "fake", is_flag=True, help="Check everything, but do not mount.")
@click.option("-n", "no_mtab", is_flag=True, help="Accepted; there is no mtab to write.")
@click.option("-v", "verbose", is_flag=True, help="Say what is mounted.")
@click.option("-N", "namespace", help="Accepted; mount(8) has entered the namespace already.")
@click.option("-t", "fstype", help="Accepted; there is one type.")
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
        click.echo(shown(f"spiderfs: {source} mounted on {mountpoint}") + (" (not really: -f)" if fake else ""))
    ctx.exit(MOUNT_FAILURE if failed else 0)
