"""`spiderfs serve`: the daemon of a mount, without the mount."""

from __future__ import annotations

from pathlib import Path

import click

from spiderfs.cli.control_files import warn
from spiderfs.cli.mount import MountCommand
from spiderfs.errors import ConfigError


@click.command(cls=MountCommand)
@click.argument("source", required=False)
@click.option("--name", required=True, metavar="NAME", help="Readers write spiderfs://NAME/PATH.")
@click.option("-o", "options", multiple=True, metavar="NAME=VALUE,...", help="Options, listed below; can be repeated.")
@click.option(
    "--config", "toml", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of options; -o wins over it."
)
@click.option("--foreground", is_flag=True, help="Stay in the foreground and log to the terminal.")
def serve(source: str | None, name: str, options: tuple[str, ...], toml: Path | None, foreground: bool) -> None:
    """Serve SOURCE as spiderfs://NAME, read-only, through the cache: without a mount, FUSE or privileges.

    Programs of this user and of root read it with spiderfs.client or fsspec. `spiderfs umount spiderfs://NAME` ends it.
    """
    from spiderfs.options.model import Options
    from spiderfs.options.paths import capacity_remark, missing_remark
    from spiderfs.protocol.requests import check_name, socket_of

    try:
        check_name(name)
    except ValueError as exc:
        raise ConfigError(f"--name: {exc}") from exc
    checked = Options.load(options, toml, source, socket_of(name), warn, is_mount=False)
    warn(capacity_remark(checked.capacity, *checked.cache_dir.all))
    if not foreground:
        # In the foreground the log says it.
        warn(missing_remark(checked.cache_dir.others))
    from spiderfs.daemon import supervisor
    from spiderfs.serve.socket_kernel import listen

    click.get_current_context().exit(supervisor.run(checked, foreground, lambda served: listen(served.mountpoint)))
