"""`spiderfs mount`: reads the options, then hands over to the supervisor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from spiderfs.cli.control_files import warn


class MountCommand(click.Command):
    """Lists every option of `-o` in its help text, from the table of options."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from spiderfs.options.model import default_rows

        with formatter.section(
            "Options of -o and of the --config file (default; * can be changed by 'spiderfs config')"
        ):
            formatter.write_dl(
                [(row.name + ("*" if row.live else ""), f"{row.help} ({row.value})") for row in default_rows()]
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
    """Show the directory SOURCE at MOUNTPOINT, read-only, through the cache.

    The --config file can name both as well.
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
    """Mount, and return the exit status once the mount can be read; with `foreground`, once the mount has ended.

    `fake` checks the options and mounts nothing.
    """
    from spiderfs.linux.mounts import check_fuse_available
    from spiderfs.options.model import Options
    from spiderfs.options.paths import capacity_remark

    checked = Options.load(options, toml, source, mountpoint)
    check_fuse_available(checked.allow_other)
    warn(capacity_remark(checked.capacity, checked.cache_dir))
    if fake:
        return 0
    from spiderfs.daemon import supervisor

    return supervisor.run(checked, foreground)
