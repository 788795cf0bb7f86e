"""`spiderfs profile`: measures a source, a loader and views, and finds the split of the cache that is fastest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spiderfs.cli.control_files import explaining, find_mount, mountpoints, printable, read_control, read_stats
from spiderfs.cli.simulate import Number, json_file, write_json
from spiderfs.errors import UsageError
from spiderfs.linux.process_table import ended_by_signals
from spiderfs.shared.layout import CacheLayout
from spiderfs.views.recipe import NO_VIEW, READY, parse_recipes

# rich and the parts that measure are imported where they are used, so that `spiderfs --help` does not wait for them.
if TYPE_CHECKING:
    from rich.console import Console

    from spiderfs.forms.profile import Form, Profile
    from spiderfs.profiling.measure import Speeds, Wanted

_MB = 1e6
# A smaller predicted factor is not worth a change.
_GAIN = 1.15
_COUNTS = ("encoded", "decoded", "augmented")


@click.command()
@click.argument("mountpoint", shell_complete=mountpoints)
@click.option(
    "--loader",
    metavar="MODULE:FUNCTION",
    help="A function that takes a directory and returns the training's loader, or (loader, step).",
)
@click.option(
    "--view",
    "views",
    default="jpeg256,bmp256",
    show_default=True,
    help="Views for the decoded form, separated by commas; none for no view.",
)
@click.option("--capacity", help="Predict for a cache of this size, such as 20GiB [default: the mount's]")
@click.option(
    "--samples", type=click.IntRange(min=1), default=256, show_default=True, help="Measure at most so many samples."
)
@click.option(
    "--uses",
    type=Number(min=1),
    default=1.0,
    show_default=True,
    help="Uses of an augmented sample before it is made again: reuse= of refurbish.",
)
@click.option(
    "--total", type=click.IntRange(min=1), help="Number of samples of the training, if the loader returns only some."
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Predict for this number of machines that train together, each like this one with such a mount.",
)
@click.option(
    "--rate",
    type=Number(min=0, min_open=True),
    help="Samples per second that the steps of a machine take, if the function returns no step.",
)
@click.option("--network", help="Bytes a second over each machine's network, such as 1.25GB [default: no limit]")
@click.option("--model", help="Size of the parameters whose gradients machines exchange, such as 100MB [default: none]")
@click.option("--planned", is_flag=True, help="The training publishes plans, so no worker waits for the source.")
@json_file
def profile(
    mountpoint: str,
    views: str,
    capacity: str | None,
    network: str | None,
    model: str | None,
    json_path: Path | None,
    **given: Any,
) -> None:
    """Measure the cost of a training's samples, and predict the throughput by the split of the cache among forms.

    It uses only the settings of the mount at MOUNTPOINT. Beside it, it mounts the same source temporarily with empty
    caches, for originals and for each view, and reads there. The function of --loader gets the directory of such a
    mount; its module may be in the working directory. The mount's cache directory keeps the result, for mounts with the
    option forms.
    """
    from rich.console import Console

    from spiderfs.forms.profile import save_record
    from spiderfs.profiling.measure import Wanted
    from spiderfs.profiling.private_mount import settings_in

    mount = find_mount(mountpoint)
    with explaining(mount):
        options, stats = settings_in(read_control(mount, "config")), read_stats(mount)
    # The first of several directories.
    options["cache_dir"] = stats["cache_dir"]
    bandwidth = None if network is None else _size("--network", network)
    model_bytes = 0.0 if model is None else _size("--model", model)
    wanted = Wanted(views=_chosen_views(views, options), network=bandwidth, model_bytes=model_bytes, **given)
    size = float(stats["capacity_bytes"]) if capacity is None else _size("--capacity", capacity)
    console = Console(highlight=False, soft_wrap=True)
    speeds, found = _measured(options, size, wanted, console)
    source = speeds.source
    console.print(
        f"source: {1000 * source.latency_s:.1f} ms for a file, {source.bytes_per_s / _MB:.1f} MB/s"
        f" with {source.readers} readers; more readers are no faster"
    )
    for view, reads in speeds.reads.items():
        name = "originals" if view == NO_VIEW else view
        console.print(
            f"cached {name}: {reads.per_s:,.0f} reads/s, {reads.bytes_per_s / _MB:.0f} MB/s, {reads.readers} readers"
        )
    if found is not None:
        _show_profile(found, console)
    console.print(advice(speeds, found))
    if json_path is not None:
        write_json(_report(options, speeds, found), json_path)
    save_record(speeds.record(found), CacheLayout(Path(options["cache_dir"])).profile)


def _measured(
    options: dict[str, str], cache_bytes: float, wanted: Wanted, console: Console
) -> tuple[Speeds, Profile | None]:
    from spiderfs.profiling.measure import measure

    above = Path(options["cache_dir"]).parent
    with ended_by_signals(), console.status("Measuring") as status:
        try:
            return measure(options, above, cache_bytes, wanted, lambda what: status.update(f"Measuring {what}"))
        except OSError as exc:
            raise UsageError(
                f"reading beside the mount failed at {exc.filename} ({exc.strerror}): see that this user can read all"
                f" of {options['source']}"
            ) from exc


def _size(option: str, text: str) -> float:
    from spiderfs.options.units import parse_size

    try:
        return float(parse_size(text))
    except ValueError as exc:
        raise UsageError(f"{option} {text}: {exc}") from exc


def _chosen_views(text: str, options: dict[str, str]) -> tuple[str, ...]:
    known = [*READY, *parse_recipes(options["views"])]
    names = [name for name in text.split(",") if name and name != NO_VIEW]
    if names and options["binding"] == "pyfuse3":
        raise UsageError("--view: a mount with binding=pyfuse3 shows no views: write --view none")
    for name in names:
        if name not in known:
            raise UsageError(f"--view {name}: the mount has no such view; it has {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _show_profile(found: Profile, console: Console) -> None:
    """Print what was measured of the loader, and a table of splits for each view."""
    from rich import box
    from rich.table import Table

    machines = f" of each of {found.nodes} machines" if found.nodes > 1 else ""
    steps = "not given" if found.step_s is None else f"{found.device_rate:,.0f} samples/s"
    console.print(
        f"loader: {found.samples:,} samples, batches of {found.batch}, {found.workers} workers on"
        f" {found.cores} cores{machines}; steps: {steps}\ncache: {found.cache_bytes / _MB:,.1f} MB"
        + (f"; augmented samples are used {found.uses:g} times" if found.uses > 1 else "")
    )
    # A loader's worker waits for the daemon, whose CPU time is that of other processes.
    table = Table(box=box.SIMPLE, title="Size and cost of a sample")
    for heading in ("form", "kB", "x original", "worker CPU ms", "waits ms", "other CPU ms"):
        table.add_column(heading, justify="left" if heading == "form" else "right", no_wrap=True)
    rows = [("uncached", found.encoded.sample_bytes, found.uncached)]
    rows += [("encoded", found.encoded.sample_bytes, found.encoded.cost)]
    rows += [(f"decoded: {view}", form.sample_bytes, form.cost) for view, form in found.views.items()]
    rows += [("augmented", found.augmented.sample_bytes, found.augmented.cost)]
    rows += [("  made and kept again", found.augmented.sample_bytes, found.making)]
    for name, size, cost in rows:
        times = [f"{1000 * seconds:.2f}" for seconds in cost]
        table.add_row(name, f"{size / 1000:.1f}", f"{size / found.encoded.sample_bytes:.2f}", *times)
    console.print(table)
    for view in _tables(found):
        table = Table(box=box.SIMPLE, title=f"Predicted{f' with the view {view}' if view else ''}; samples by form")
        for heading in ("forms=", *_COUNTS, "samples/s", "bottleneck"):
            table.add_column(heading, justify="left" if heading in ("forms=", "bottleneck") else "right", no_wrap=True)
        for row in _splits(found, view):
            table.add_row(
                *(f"{row['split']}{' best' if row['best'] else ''}", *(f"{row[name]:,.0f}" for name in _COUNTS)),
                *(f"{row['samples_per_s']:,.0f}", str(row["bottleneck"])),
                style="bold" if row["best"] else "",
            )
        console.print(table)


def advice(speeds: Speeds, found: Profile | None) -> str:
    """What to mount with, and why, in one sentence."""
    from spiderfs.forms.partition import Split

    size = speeds.reads[NO_VIEW].bytes / speeds.reads[NO_VIEW].files
    source = f"the source gives {speeds.source.bytes_per_s / size:,.0f} files/s"
    if found is None:
        return f"{source}: for mount options, name your loader with --loader MODULE:FUNCTION"
    plain = found.predicted(Split(1, 0, 0), None).samples_per_s
    view, split = max(
        ((view, found.best(view)) for view in _tables(found)),
        key=lambda chosen: found.predicted(chosen[1], chosen[0]).samples_per_s,
    )
    best = found.predicted(split, view)
    why = f"your loader makes {found.preparing_rate:,.0f} samples/s of cached originals, {source}"
    options, expect = "", f"expect {best.samples_per_s:,.0f} samples/s"
    if best.samples_per_s < _GAIN * plain:
        view, split, best = None, Split(1, 0, 0), found.predicted(Split(1, 0, 0), None)
        what, expect = "cache originals alone", f"expect {plain:,.0f} samples/s"
    else:
        options = f"view={view}," if split.decoded and view else ""
        what = f"mount with -o {options}forms={split}"
        expect += f" in place of {plain:,.0f}"
    planned = replace(found, planned=True).predicted(split, view).samples_per_s
    plan = f", and {planned:,.0f} with trainer_hook.plan()" if planned >= _GAIN * best.samples_per_s else ""
    return f"{why}: {what}; {expect}{plan}"


def _tables(found: Profile) -> list[str | None]:
    return [*found.views] or [None]


def _splits(found: Profile, view: str | None) -> list[dict[str, Any]]:
    """The best split and those that are shown beside it, each with what is predicted."""
    from spiderfs.forms.profile import SHOWN

    best = found.best(view)
    rows = []
    for split in dict.fromkeys([best, *SHOWN]):
        counts, prediction = found.counts(split, view), found.predicted(split, view)
        rows.append(
            {
                "split": str(split),
                "best": split == best,
                **{name: getattr(counts, name) for name in _COUNTS},
                "samples_per_s": prediction.samples_per_s,
                "bottleneck": prediction.bottleneck,
            }
        )
    return rows


def _report(options: dict[str, str], speeds: Speeds, found: Profile | None) -> dict[str, Any]:
    report: dict[str, Any] = {
        "mountpoint": printable(options["mountpoint"]),
        "source": speeds.source._asdict(),
        "reads": {view: reads._asdict() for view, reads in speeds.reads.items()},
    }
    if found is not None:
        plain = ("cache_bytes", "cores", "samples", "workers", "batch", "step_s", "planned", "uses", "nodes")
        report |= {"network_bandwidth": found.network_bandwidth, "model_bytes": found.model_bytes}
        report |= {name: getattr(found, name) for name in plain}
        report["forms"] = {
            "uncached": found.uncached._asdict(),
            "encoded": _form(found.encoded),
            **{view: _form(form) for view, form in found.views.items()},
            "augmented": _form(found.augmented),
        }
        report["keeping"] = found.keeping._asdict()
        report["predicted"] = {view or NO_VIEW: _splits(found, view) for view in _tables(found)}
    return report


def _form(form: Form) -> dict[str, Any]:
    return {"sample_bytes": form.sample_bytes, **form.cost._asdict()}
