"""`spiderfs simulate`: replays a recorded trace with other policies, through the engine that also serves mounts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from spiderfs.cli.control_files import printable
from spiderfs.errors import UsageError

# numpy and rich are imported where they are used, so that `spiderfs --help` does not wait for them.
if TYPE_CHECKING:
    from rich.console import Console


class Number(click.FloatRange):
    """A number in a range; click alone lets nan pass, for it is neither below nor above."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        converted = super().convert(value, param, ctx)
        if converted != converted:
            self.fail(f"{value!r} is no number.", param, ctx)
        return converted


json_file = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures to this file too."
)


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--policy", "policies", default="all", show_default=True, help="Policies, separated by commas, or all.")
@click.option(
    "--capacity",
    "capacities",
    default="10%,20%,50%",
    show_default=True,
    help="Capacities, separated by commas: bytes, sizes (5GiB), or percent of the bytes of all distinct samples.",
)
@click.option(
    "--ratio", type=Number(0, 1), help="Share of the importance section, for spider [default: the recorded shares]"
)
@click.option(
    "--radius",
    "radii",
    help="Compute the scores again with these radii: numbers, class or nearest, separated by commas.",
)
@click.option(
    "--neighbours",
    type=click.IntRange(1, 1_000_000),
    help="Compute the scores again with at most this number of nearest neighbours [default: 500, as in a mount]",
)
@click.option(
    "--embeddings",
    type=click.Choice(["unit", "raw"]),
    help="Compute the scores again with these embeddings [default: unit, as in a mount]",
)
@click.option(
    "--epoch", "epoch_length", type=click.IntRange(min=1), help="Accesses in an epoch [default: as many as samples]"
)
@click.option(
    "--plans",
    is_flag=True,
    help="Follow the recorded plans of training runs, and count the pending samples of jobs that exchange.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Deal the accesses in turn to this number of nodes, each with this capacity, which share caches (`peers`).",
)
@json_file
def simulate(
    trace: Path,
    policies: str,
    capacities: str,
    radii: str | None,
    neighbours: int | None,
    embeddings: Literal["unit", "raw"] | None,
    json_path: Path | None,
    **given: Any,
) -> None:
    """Replay TRACE through the cache engine and compare policies.

    TRACE is a file that `-o trace=FILE` has recorded, or a text with `key size` on each line. The policy belady knows
    the whole trace and keeps the samples with the earliest next use; it is always shown, as the bound for all others.

    --radius, --neighbours and --embeddings compute the scores of the recorded training run again, for each policy that
    uses scores. For each radius this takes as long as it took in the mount.
    """
    from rich.console import Console

    console = Console()
    from spiderfs.simulation import chosen_capacities, chosen_policies, chosen_settings, compare
    from spiderfs.trace import read_trace

    with console.status("Replaying") as status:
        report = compare(
            read_trace(trace),
            printable(trace.name),
            chosen_policies(policies),
            chosen_capacities(capacities),
            settings=chosen_settings(radii, neighbours, embeddings),
            progress=lambda begins: status.update(f"Replaying {begins}"),
            **given,
        )
    show(report, console)
    if json_path is not None:
        write_json(report, json_path)


def show(report: dict[str, Any], console: Console) -> None:
    from rich import box
    from rich.table import Table

    from spiderfs.simulation import caption, columns, lines_about_scorings, rows

    title = f"Policies on {report['trace']}"
    table = Table(
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
        title=title,
        caption=caption(report),
        caption_justify="left",
    )
    for number, column in enumerate(columns(report)):
        table.add_column(column, justify="left" if number < 2 else "right")
    for cells, ends_capacity in rows(report):
        table.add_row(*cells, end_section=ends_capacity)
    console.print(table)
    for line in lines_about_scorings(report):
        console.print(line)


def write_json(report: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}") from exc
