"""`spiderfs simulate`: replays a recorded trace with other policies, through the engine that also serves mounts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from spiderfs.cli.control_files import printable
from spiderfs.errors import UsageError
from spiderfs.options.units import Capacity

# numpy and rich are imported where they are used, so that `spiderfs --help` does not wait for them.
if TYPE_CHECKING:
    from rich.console import Console

    from spiderfs.scorer.scoring import ScorerOptions
    from spiderfs.trace.format import Trace

BOUND = "belady"


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--policy", "policies", default="all", show_default=True, help="Policies, separated by commas, or all.")
@click.option(
    "--capacity",
    "capacities",
    default="10%,20%,50%",
    show_default=True,
    help="Capacities, separated by commas: bytes, sizes (5GiB), or percent of the bytes of all distinct samples.",
)
@click.option(
    "--ratio",
    type=click.FloatRange(0, 1),
    help="Share of the importance section, for spider [default: the recorded shares]",
)
@click.option(
    "--radius",
    "radii",
    help="Compute the scores again with these radii: numbers up to 2, or auto, separated by commas.",
)
@click.option(
    "--neighbours",
    type=click.IntRange(1, 1_000_000),
    help="Compute the scores again, with neighbours among so many nearest samples [default: 100, as in a mount]",
)
@click.option(
    "--epoch",
    "epoch_length",
    type=click.IntRange(min=1),
    help="Accesses in an epoch [default: as many as samples]",
)
@click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures to this file too."
)
@click.option("--self-test", "check", is_flag=True, help="Replay no trace; check the simulator against known formulas.")
def simulate(
    trace: Path | None,
    policies: str,
    capacities: str,
    ratio: float | None,
    radii: str | None,
    neighbours: int | None,
    epoch_length: int | None,
    json_path: Path | None,
    check: bool,
) -> None:
    """Replay TRACE through the cache engine and compare policies.

    TRACE is a file that `-o trace=FILE` has recorded, or a text with `key size` on each line. The policy belady knows
    the whole trace and keeps what is used next soonest; it is always shown, as the bound for all others.

    With --radius or --neighbours, the scores of the recorded training are computed again, in the way of each policy
    that uses scores. For each radius that takes as long as it took the mount.
    """
    from rich.console import Console

    console = Console()
    if check:
        if not run_self_test(console):
            raise click.exceptions.Exit(1)
        return
    if trace is None:
        raise click.UsageError("name a trace, or write --self-test")
    if ratio is not None and math.isnan(ratio):
        raise UsageError("--ratio nan: write a number from 0 to 1")
    from spiderfs.simulation.hint_source import chosen_settings
    from spiderfs.trace.format import read_trace

    with console.status("Replaying"):
        report = compare(
            read_trace(trace),
            printable(trace.name),
            chosen_policies(policies),
            chosen_capacities(capacities),
            epoch_length,
            ratio,
            chosen_settings(radii, neighbours),
        )
    show(report, console)
    if json_path is not None:
        write_json(report, json_path)


def chosen_policies(text: str) -> list[str]:
    """The policies that an option names, the bound last; raises UsageError if there is no such policy."""
    from spiderfs.policies import POLICIES

    names = list(POLICIES) if text == "all" else [word.strip() for word in text.split(",")]
    for name in names:
        if name not in POLICIES:
            raise UsageError(f"there is no policy {name!r}: choose among all, {', '.join(POLICIES)}")
    return [*dict.fromkeys(name for name in names if name != BOUND), BOUND]


def chosen_capacities(text: str) -> list[Capacity]:
    """The capacities that an option names; raises UsageError if one cannot be read."""
    try:
        return [Capacity.parse(word.strip()) for word in text.split(",")]
    except ValueError as exc:
        raise UsageError(f"capacity: {exc}") from exc


def compare(
    trace: Trace,
    name: str,
    policies: list[str],
    capacities: list[Capacity],
    epoch_length: int | None,
    ratio: float | None = None,
    settings: Sequence[ScorerOptions] = (),
) -> dict[str, Any]:
    """Replay a trace with every policy at every capacity; the result is plain data, ready for JSON."""
    from spiderfs.core.engine import Engine
    from spiderfs.core.guided import Guided
    from spiderfs.policies import POLICIES
    from spiderfs.simulation.hint_source import Guidance
    from spiderfs.simulation.replay import policy_for, replay

    accesses, guidance = trace.accesses(), Guidance(trace, settings, ratio)
    if not len(accesses):
        raise UsageError(f"the trace {name} holds no accesses: record one with -o trace=FILE")
    epoch_length = min(epoch_length or accesses.distinct, len(accesses))
    results = []
    for capacity in capacities:
        capacity_bytes = capacity.budget_bytes(accesses.distinct_bytes)
        runs = [(policy, setting) for policy in policies for setting in guidance.settings_for(POLICIES[policy])]
        for policy, setting in runs:
            hints = guidance.hints(POLICIES[policy], setting)
            engine = Engine(policy_for(POLICIES[policy], accesses), capacity_bytes)
            if ratio is not None and isinstance(engine.policy, Guided):
                engine.policy.set_ratio(ratio)
            began = perf_counter()
            result = replay(engine, accesses, epoch_length, hints)
            results.append(
                {
                    "policy": policy,
                    **guidance.described(POLICIES[policy].scoring, setting),
                    "capacity": str(capacity),
                    "capacity_bytes": capacity_bytes,
                    "hit_ratio": result.hit_ratio,
                    "warm_hit_ratio": result.warm_hit_ratio,
                    "redirects": int(result.redirects.sum()),
                    "origin_bytes": int(result.origin_bytes.sum()),
                    "origin_bytes_per_sample": result.origin_bytes_per_sample,
                    "seconds": perf_counter() - began,
                    "epochs": [
                        {
                            "opens": opens,
                            "hits": hits,
                            "redirects": redirects,
                            "origin_bytes": origin_bytes,
                            "coverage": coverage,
                        }
                        for opens, hits, redirects, origin_bytes, coverage in zip(
                            result.opens.tolist(),
                            result.hits.tolist(),
                            result.redirects.tolist(),
                            result.origin_bytes.tolist(),
                            result.coverage.tolist(),
                            strict=True,
                        )
                    ],
                }
            )
    return {
        "trace": name,
        "accesses": len(accesses),
        "distinct": accesses.distinct,
        "distinct_bytes": accesses.distinct_bytes,
        "epoch_length": epoch_length,
        "served_ratio_when_recorded": trace.served_ratio() if trace.recorded else None,
        "accuracies_when_recorded": trace.accuracies(),
        "scorings": guidance.scorings,
        "results": results,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Print a comparison as a table."""
    from rich.table import Table

    coverage = [epoch["coverage"] for epoch in report["results"][0]["epochs"]]
    caption = (
        f"{report['accesses']:,} accesses to {report['distinct']:,} samples, {report['distinct_bytes']:,} bytes in all;"
        f" {len(coverage)} epochs of {report['epoch_length']:,} accesses,"
        f" each seeing {sum(coverage) / len(coverage):.0%} of the samples on average."
    )
    if report["served_ratio_when_recorded"] is not None:
        caption += f" When it was recorded, {report['served_ratio_when_recorded']:.1%} did not wait for the source."
    caption += " belady is the optimum where all sizes are equal, and near it where they are not."
    table = Table(title=f"Policies on {report['trace']}", caption=caption, caption_justify="left")
    table.add_column("capacity")
    table.add_column("policy, radius" if report["scorings"] else "policy")
    for column in ("hits", "hits after epoch 1", "redirects", "origin bytes per sample", "origin bytes"):
        table.add_column(column, justify="right")
    for index, row in enumerate(report["results"]):
        is_bound = row["policy"] == BOUND
        starts_capacity = index == 0 or report["results"][index - 1]["capacity"] != row["capacity"]
        table.add_row(
            row["capacity"] if starts_capacity else "",
            row["policy"] + (" (bound)" if is_bound else f", {row['radius']}" if row["radius"] else ""),
            f"{row['hit_ratio']:.1%}",
            f"{row['warm_hit_ratio']:.1%}",
            f"{row['redirects']:,}",
            f"{row['origin_bytes_per_sample']:,.0f}",
            f"{row['origin_bytes']:,}",
            end_section=is_bound,
        )
    console.print(table)
    for scoring in report["scorings"]:
        for name, facts in scoring["lists"].items():
            found = ", ".join(f"{fact} {value.partition('  ')[0]}" for fact, value in facts.items())
            radius = f", radius {scoring['radius']}" if scoring["radius"] else ""
            console.print(f"Scored anew ({scoring['scoring']}{radius}), list {name}: {found}")


def write_json(report: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as exc:
        raise UsageError(f"cannot write {path}: {exc.strerror}") from exc


def run_self_test(console: Console) -> bool:
    """Print every check with its outcome; returns whether all have passed."""
    from rich.table import Table

    from spiderfs.simulation.checks import self_test

    table = Table(title="The simulator against known formulas")
    for column in ("check", "cached"):
        table.add_column(column)
    for column in ("measured", "expected", "outcome"):
        table.add_column(column, justify="right")
    checks = list(self_test())
    for check in checks:
        expected = f"{check.relation.value} {check.expected:.4f}"
        if check.tolerance:
            expected += f" ± {check.tolerance:.3f}"
        outcome = "[green]pass[/green]" if check.passed else "[bold red]FAIL[/bold red]"
        table.add_row(check.what, f"{check.capacity:.0%}", f"{check.measured:.4f}", expected, outcome)
    console.print(table)
    failed = sum(not check.passed for check in checks)
    console.print(f"{len(checks) - failed} of {len(checks)} checks passed.")
    return failed == 0
