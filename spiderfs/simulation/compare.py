"""The comparison that `spiderfs simulate` makes: every policy at every capacity over one trace, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

from spiderfs.core.accesses import Accesses
from spiderfs.core.engine import Engine
from spiderfs.core.hints import RankNews
from spiderfs.core.homes import Homes
from spiderfs.errors import UsageError
from spiderfs.options.units import Capacity, round_size
from spiderfs.policies import POLICIES
from spiderfs.scorer.scoring import ScorerOptions
from spiderfs.simulation.hint_source import HintSource
from spiderfs.simulation.replay import Replay, policy_for, replay, replay_on_nodes
from spiderfs.trace.format import Trace

# The policy that knows the whole trace.
BOUND = "belady"


def chosen_policies(text: str) -> list[str]:
    """The policies that an option names, the bound last; raises UsageError if there is no such policy."""
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
    plans: bool = False,
    nodes: int = 1,
) -> dict[str, Any]:
    """Replay a trace with every policy at every capacity; the result is plain data, ready for JSON.

    With `plans`, those that were recorded overrule every policy but the bound, and so does what jobs that exchange
    samples owe. Each of `nodes` has such a capacity; the bound is one cache with the room of all.
    """
    news = _recorded_plans(trace, name, nodes) if plans else []
    accesses, hint_source = trace.accesses(), HintSource(trace, settings, ratio)
    if not len(accesses):
        raise UsageError(f"the trace {name} holds no accesses: record one with -o trace=FILE")
    epoch_length = min(epoch_length or accesses.distinct, len(accesses))
    results = []
    for capacity in capacities:
        capacity_bytes = capacity.budget_bytes(accesses.distinct_bytes)
        runs = [(policy, setting) for policy in policies for setting in hint_source.settings_for(POLICIES[policy])]
        for policy, setting in runs:
            hints = hint_source.hints(POLICIES[policy], setting)
            began = perf_counter()
            known = () if policy == BOUND else news
            engine = partial(_engine, policy, accesses)
            if nodes > 1 and policy != BOUND:
                result = replay_on_nodes(nodes, engine, capacity_bytes, accesses, epoch_length, hints, ratio)
            else:
                result = replay(engine(capacity_bytes * nodes), accesses, epoch_length, hints, ratio=ratio, news=known)
            results.append(
                {
                    "policy": policy,
                    **hint_source.described(POLICIES[policy].scoring, setting),
                    "capacity": str(capacity),
                    "capacity_bytes": capacity_bytes,
                    **_figures(result),
                    "seconds": perf_counter() - began,
                    "epochs": _epochs(result),
                }
            )
    return {
        "trace": name,
        "accesses": len(accesses),
        "distinct": accesses.distinct,
        "distinct_bytes": accesses.distinct_bytes,
        "epoch_length": epoch_length,
        "plans": plans,
        "nodes": nodes,
        "served_ratio_when_recorded": trace.served_ratio() if trace.recorded else None,
        "accuracies_when_recorded": trace.accuracies(),
        "scorings": hint_source.scorings,
        "results": results,
    }


def _recorded_plans(trace: Trace, name: str, nodes: int) -> list[tuple[int, RankNews]]:
    if nodes > 1:
        raise UsageError("the plans of a trace are those of one mount: leave out --plans, or --nodes")
    if not trace.has_plans:
        raise UsageError(f"the trace {name} holds no plans: record one of trainings that attach or plan")
    return trace.rank_news()


def _engine(policy: str, accesses: Accesses, capacity_bytes: int, homes: Homes | None = None) -> Engine:
    return Engine(policy_for(POLICIES[policy], accesses), capacity_bytes, homes=homes)


def _figures(result: Replay) -> dict[str, Any]:
    return {
        "hit_ratio": result.hit_ratio,
        "warm_hit_ratio": result.warm_hit_ratio,
        "redirects": int(result.redirects.sum()),
        "origin_bytes": int(result.origin_bytes.sum()),
        "origin_bytes_per_sample": result.origin_bytes_per_sample,
    }


def _epochs(result: Replay) -> list[dict[str, Any]]:
    columns = {
        "opens": result.opens,
        "hits": result.hits,
        "redirects": result.redirects,
        "origin_bytes": result.origin_bytes,
        "coverage": result.coverage,
    }
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def columns(report: dict[str, Any]) -> tuple[str, ...]:
    """The headings of the table of a comparison; the first two are of words, the others of numbers."""
    policy = "policy, radius" if report["scorings"] else "policy"
    return "capacity", policy, "hits", "later hits", "redirects", "origin / sample", "origin"


def rows(report: dict[str, Any]) -> list[tuple[tuple[str, ...], bool]]:
    """The lines of that table, and whether each is a capacity's last; the capacity is named in its first line alone."""
    found: list[tuple[tuple[str, ...], bool]] = []
    shown_capacity = None
    for row in report["results"]:
        is_bound = row["policy"] == BOUND
        cells = (
            row["capacity"] if row["capacity"] != shown_capacity else "",
            row["policy"] + (" (bound)" if is_bound else f", {row['radius']}" if row["radius"] else ""),
            f"{row['hit_ratio']:.1%}",
            f"{row['warm_hit_ratio']:.1%}",
            f"{row['redirects']:,}",
            round_size(row["origin_bytes_per_sample"]),
            round_size(row["origin_bytes"]),
        )
        found.append((cells, is_bound))
        shown_capacity = row["capacity"]
    return found


def caption(report: dict[str, Any]) -> str:
    """The text below the table of a comparison."""
    coverage = [epoch["coverage"] for epoch in report["results"][0]["epochs"]]
    text = (
        f"{report['accesses']:,} accesses to {report['distinct']:,} samples, {report['distinct_bytes']:,} bytes in all;"
        f" {len(coverage)} epochs of {report['epoch_length']:,} accesses,"
        f" each seeing {sum(coverage) / len(coverage):.0%} of the samples on average."
    )
    if report["served_ratio_when_recorded"] is not None:
        text += f" When it was recorded, {report['served_ratio_when_recorded']:.1%} did not wait for the source."
    if report["plans"]:
        text += " Recorded plans, and what jobs that exchange samples owe, overrule all policies but belady."
    if report["nodes"] > 1:
        text += (
            f" {report['nodes']} nodes with this capacity each take the accesses in turns; hits and origin are those of"
            " all, and belady has the room of all."
        )
    text += " Later hits are those after epoch 1; origin is what was read from the source."
    return text + " belady is the optimum where all sizes are equal, and near it where they are not."


def lines_about_scorings(report: dict[str, Any]) -> list[str]:
    """One line for each course that was scored anew."""
    lines = []
    for scoring in report["scorings"]:
        for number, facts in scoring["courses"].items():
            found = ", ".join(f"{fact} {value.partition('  ')[0]}" for fact, value in facts.items())
            radius = f", radius {scoring['radius']}" if scoring["radius"] else ""
            lines.append(f"Scored anew ({scoring['scoring']}{radius}), course {number}: {found}")
    return lines
