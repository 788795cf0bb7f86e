"""`spiderfs mount`: reads the options, then hands over to the supervisor; and `spiderfs mount-helper`, for mount(8).

mount(8) calls /sbin/mount.spiderfs for `mount -t spiderfs` and for fstab, as `mount.TYPE SOURCE DIR [-sfnv]
[-N NAMESPACE] [-o OPTIONS] [-t TYPE]`, and understands the exit status 32 as "mount failure".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import click

from spiderfs.cli.control_files import printable, warn
from spiderfs.errors import SpiderfsError
from spiderfs.options.mount_strings import REFUSED_OPTIONS, SETTING_OPTIONS, split_options

MOUNT_FAILURE = 32
# libmount adds `rw` whenever the user has not written `ro`, so `rw` does not mean here that the user asked for it.
OPTIONS_OF_LIBMOUNT = frozenset({"rw"})


class MountCommand(click.Command):
    """Lists every option of `-o` in its help text, from the table of options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from spiderfs.options.model import Options, option_name

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as exc:
            name = exc.option_name.lstrip("-")
            if name in map(option_name, Options.model_fields):
                raise click.UsageError(f"There is no option --{name}: write -o {name}=VALUE.", ctx) from exc
            raise

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from spiderfs.options.model import default_rows

        formatter.write_paragraph()
        formatter.write_text("Options of -o and of the --config file (default; * can be changed by 'spiderfs config'):")
        for group, rows in groupby(default_rows(), lambda row: row.group):
            with formatter.section(group):
                formatter.write_dl(
                    [(row.name + ("*" if row.live else ""), f"{row.help} ({row.value})") for row in rows]
                )


@click.command(cls=MountCommand)
@click.argument("source", required=False)
@click.argument("mountpoint", required=False)
@click.option("-o", "options", multiple=True, metavar="NAME=VALUE,...", help="Options, listed below; can be repeated.")
@click.option(
    "--config", "toml", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of options; -o wins over it."
)
@click.option("--foreground", is_flag=True, help="Stay in the foreground and log to the terminal.")
def mount(
    source: str | None, mountpoint: str | None, options: tuple[str, ...], toml: Path | None, foreground: bool
) -> None:
    """Show SOURCE at MOUNTPOINT, read-only, through the cache.

    SOURCE is a directory, or a URL: s3://BUCKET/PREFIX, gs:// or az://, hf://datasets/NAME, https://HOST/MANIFEST. The
    --config file can name both as well.
    """
    click.get_current_context().exit(start(options, toml, source, mountpoint, foreground=foreground))


def start(
    options: Sequence[str],
    toml: Path | None,
    source: str | None,
    mountpoint: str | None,
    *,
    foreground: bool = False,
    fake: bool = False,
) -> int:
    """Mount (`fake`: check the options), and return the exit status; with `foreground`, once the mount has ended."""
    from spiderfs.linux.mounts import check_fuse_available
    from spiderfs.options.model import Options
    from spiderfs.options.paths import capacity_remark, missing_remark

    checked = Options.load(options, toml, source, mountpoint, warn)
    check_fuse_available(checked.allow_other)
    warn(capacity_remark(checked.capacity, *checked.cache_dir.all))
    if not foreground:
        # In the foreground the log says it.
        warn(missing_remark(checked.cache_dir.others))
    if fake:
        return 0
    from spiderfs.daemon import supervisor

    status = supervisor.run(checked, foreground)
    # Without standard descriptors there is no `sys.stdout`.
    if status == 0 and not foreground and sys.stdout is not None and sys.stdout.isatty():
        place = printable(checked.mountpoint)
        click.echo(f"mounted at {place}, cache in {printable(checked.cache_dir)}: watch it with 'spiderfs top {place}'")
    return status


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
    try:
        failed = start(translate(options, sloppy), None, source, mountpoint, fake=fake) != 0
    except SpiderfsError as exc:
        click.echo(f"spiderfs: {' '.join(str(exc).split())}", err=True)
        failed = True
    if verbose and not failed:
        click.echo(printable(f"spiderfs: {source} mounted on {mountpoint}") + (" (checked only: -f)" if fake else ""))
    ctx.exit(MOUNT_FAILURE if failed else 0)
