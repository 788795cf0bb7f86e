"""`spiderfs mount` and `serve` hand over to the supervisor; `umount` waits until daemons have released their caches.

`spiderfs mount-helper` is for mount(8), which calls /sbin/mount.spiderfs for `mount -t spiderfs` and for fstab, as
`mount.TYPE SOURCE DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`. Exit status 32 means "mount failure" to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import click

from spiderfs.cli.control_files import SERVED, all_served, daemon_of, find_mount, place_of, printable, read_stats, warn
from spiderfs.cli.control_files import mountpoints as complete
from spiderfs.errors import ConfigError, MountError, SpiderfsError, UsageError
from spiderfs.linux.mounts import FSTYPE, Mount, mounts, unmount
from spiderfs.options.mount_strings import REFUSED_OPTIONS, SETTING_OPTIONS, split_options
from spiderfs.shared.layout import CacheLayout

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


def option_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """What a shell can complete the last option of an -o to."""
    from spiderfs.options.model import default_rows

    before, comma, begun = incomplete.rpartition(",")
    return [f"{before}{comma}{row.name}=" for row in default_rows() if row.name.startswith(begun)]


option_strings = click.option(
    "-o",
    "options",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Options, listed below; can be repeated.",
    shell_complete=option_names,
)
config_file = click.option(
    "--config", "toml", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of options; -o wins over it."
)
in_foreground = click.option("--foreground", is_flag=True, help="Stay in the foreground and log to the terminal.")


@click.command(cls=MountCommand)
@click.argument("source", required=False)
@click.argument("mountpoint", required=False)
@option_strings
@config_file
@in_foreground
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
    place: str | Path | None,
    *,
    foreground: bool = False,
    fake: bool = False,
    served: bool = False,
) -> int:
    """Mount (`fake`: only check), or with `served` at a socket; the exit status, in the foreground at the end."""
    from spiderfs.linux.mounts import check_fuse_available
    from spiderfs.options.model import Options
    from spiderfs.options.paths import capacity_remark, missing_remark

    checked = Options.load(options, toml, source, place, warn, is_mount=not served)
    if not served:
        check_fuse_available(checked.allow_other)
    warn(capacity_remark(checked.capacity, *checked.cache_dir.all))
    if not foreground:
        # In the foreground the log says it.
        warn(missing_remark(checked.cache_dir.others))
    if fake:
        return 0
    from spiderfs.daemon import supervisor

    if served:
        from spiderfs.serve.socket_kernel import listen

        return supervisor.run(checked, foreground, lambda options: listen(options.mountpoint))
    status = supervisor.run(checked, foreground)
    # Without standard descriptors there is no `sys.stdout`.
    if status == 0 and not foreground and sys.stdout is not None and sys.stdout.isatty():
        shown = printable(checked.mountpoint)
        click.echo(f"mounted at {shown}, cache in {printable(checked.cache_dir)}: watch it with 'spiderfs top {shown}'")
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
@click.option("-n", is_flag=True, expose_value=False, help="Has no effect: there is no mtab to write.")
@click.option("-v", "verbose", is_flag=True, help="Print what is mounted.")
@click.option("-N", expose_value=False, help="Has no effect: mount(8) has already entered the namespace.")
@click.option("-t", expose_value=False, help="Has no effect: there is only one type.")
@click.option("-o", "options", multiple=True)
@click.pass_context
def mount_helper(
    ctx: click.Context, source: str, mountpoint: str, sloppy: bool, fake: bool, verbose: bool, options: tuple[str, ...]
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


@click.command(cls=MountCommand)
@click.argument("source", required=False)
@click.option("--name", required=True, metavar="NAME", help="Readers write spiderfs://NAME/PATH.")
@option_strings
@config_file
@in_foreground
def serve(source: str | None, name: str, options: tuple[str, ...], toml: Path | None, foreground: bool) -> None:
    """Serve SOURCE as spiderfs://NAME, read-only, through the cache: without a mount, FUSE or privileges.

    Programs of this user and of root read it with spiderfs.client or fsspec. `spiderfs umount spiderfs://NAME` ends it.
    """
    from spiderfs.protocol.requests import check_name, socket_of

    try:
        check_name(name)
    except ValueError as exc:
        raise ConfigError(f"--name: {exc}") from exc
    click.get_current_context().exit(start(options, toml, source, socket_of(name), foreground=foreground, served=True))


# A daemon ends within a second, but its disk may take longer, when LMDB flushes gigabytes of dirty pages.
RELEASE_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05


@click.command()
@click.argument("mountpoint", required=False, shell_complete=complete)
@click.option("--all", "every", is_flag=True, help="Unmount all your mounts, as root all mounts; end what you serve.")
@click.option("--lazy", is_flag=True, help="Detach it even while it is in use or hangs; do not wait for the daemon.")
@click.pass_context
def umount(ctx: click.Context, mountpoint: str | None, every: bool, lazy: bool) -> None:
    """Unmount the mount at MOUNTPOINT, or end serving spiderfs://NAME, and wait until its daemon has ended."""
    if mountpoint is not None and not every:
        _detach(find_mount(mountpoint), lazy)()
        return
    if mountpoint is not None or not every:
        raise UsageError("name one MOUNTPOINT to unmount, or write --all")
    detached, failures = [], []
    # The last one first: it may lie in an earlier one.
    for mount in (*reversed(_own_mounts()), *all_served()):
        try:
            detached.append((mount, _detach(mount, lazy)))
        except ConnectionRefusedError:
            continue  # the socket of a daemon that was killed
        except (MountError, OSError) as exc:
            failures.append(str(exc))
    for mount, wait in detached:
        try:
            wait()
            click.echo(printable(f"unmounted {place_of(mount)}"))
        except MountError as exc:
            failures.append(str(exc))
    for failure in failures:
        click.echo(f"spiderfs: {printable(failure)}", err=True)
    ctx.exit(1 if failures else 0)


def _own_mounts() -> list[Mount]:
    """The mounts that this user made, or all for root; those below another on one mount point too."""
    user = os.geteuid()
    found = [mount for mount in mounts() if mount.fstype == FSTYPE]
    return [mount for mount in found if user == 0 or f"user_id={user}" in mount.options.split(",")]


def _detach(mount: Mount, lazy: bool) -> Callable[[], None]:
    """Unmount, or end what is served; returns what then waits for the daemon's end (`_wait`)."""
    if mount.fstype == SERVED:
        daemon, stats = daemon_of(mount), read_stats(mount)
        os.kill(daemon, signal.SIGTERM)
        return partial(_wait, mount, set(), "" if lazy else str(stats["cache_dir"]), str(stats["pid"]), lazy)
    cache_dir, pid = "", ""
    if not lazy:
        try:
            stats = read_stats(mount)
            cache_dir, pid = str(stats.get("cache_dir", "")), str(stats.get("pid", ""))
        except OSError as exc:
            # Our own thread, which still waits for the hung daemon, keeps the mount in use, and so may the readers of a
            # dead daemon. Only a lazy unmount works then.
            lazy = isinstance(exc, TimeoutError) or exc.errno == errno.ENOTCONN
            if isinstance(exc, TimeoutError):
                click.echo(
                    printable(f"spiderfs: {mount.mountpoint} does not answer: it is detached without its daemon"),
                    err=True,
                )
    places = _places_of(mount)
    unmount(mount.mountpoint, lazy)
    return partial(_wait, mount, places, cache_dir, pid, lazy)


def _wait(mount: Mount, places: set[Path], cache_dir: str, pid: str, lazy: bool) -> None:
    """Wait until the daemon of a mount, which was at these places, has ended; raises MountError if it does not end."""
    # A mount that someone has made since may have the number of the one that is gone.
    others = sorted(map(str, places & _places_of(mount) - {mount.mountpoint}))
    if others and not lazy:
        raise MountError(
            f"{mount.mountpoint} is unmounted, but the same mount is also at {', '.join(others)}: unmount that too, "
            f"then its daemon ends"
        )
    if cache_dir and not wait_released(Path(cache_dir), RELEASE_TIMEOUT_S):
        raise MountError(
            f"{mount.mountpoint} is unmounted, but after {RELEASE_TIMEOUT_S:.0f} s its daemon still uses {cache_dir}:"
            f" wait until it ends, or end it with 'kill {pid}'"
        )


def _places_of(mount: Mount) -> set[Path]:
    return {other.mountpoint for other in mounts() if other.device == mount.device}


def wait_released(cache_dir: Path, timeout_s: float) -> bool:
    """Wait until no daemon uses this cache directory; returns False if one still does after the time limit."""
    try:
        # While the daemon lives, it holds a flock(2) on this file.
        fd = os.open(CacheLayout(cache_dir).lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # Either the directory is gone together with its daemon, or it is another user's and cannot be watched.
        return True
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(POLL_INTERVAL_S)
    finally:
        os.close(fd)
