"""What a plan and samplers gain over an LRU cache, of what benchmarks.training.train has kept: figures and a picture.

    .venv-dev/bin/python -m benchmarks.training.headline

Reads docs/results/train.json, prints the figures, and draws docs/results/headline.png. It measures nothing.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "docs/results/train.json"
PICTURE = ROOT / "docs/results/headline.png"

# Names in the file, and how a reader of the README knows them; the first is what the others are compared with.
WAYS = {
    "lru": "LRU cache",
    "uniform+plan": "spiderfs with a plan",
    "spider": "plan, SpiderSampler",
    "echo 2": "plan, EchoSampler",
}
COMPUTING, WAITING, BYTES = "#4c956c", "#d68c45", "#5b7db1"


class Bar(NamedTuple):
    """Means over seeds of the epochs after the first, which fills the cache; top-1 after the last, with deviation."""

    name: str
    seconds: float
    waiting_seconds: float
    origin_share: float
    top1: float
    top1_deviation: float
    times_as_fast: float


def bars(result: dict[str, Any]) -> list[Bar]:
    found: list[Bar] = []
    by_way = {
        way: {
            run["seed"]: run["epochs"]
            for run in result["runs"]
            if run["configuration"] == way and run.get("workers", result["loader_workers"]) == result["loader_workers"]
        }
        for way in WAYS
    }
    baseline = by_way[next(iter(WAYS))]
    for way, name in WAYS.items():
        runs = by_way[way]
        top1 = [epochs[-1]["top1"] for epochs in runs.values()]
        later = [epoch for epochs in runs.values() for epoch in epochs[1:]]
        faster = [
            statistics.fmean(epoch["seconds"] for epoch in baseline[seed][1:])
            / statistics.fmean(epoch["seconds"] for epoch in epochs[1:])
            for seed, epochs in runs.items()
        ]
        found.append(
            Bar(
                name,
                statistics.fmean(epoch["seconds"] for epoch in later),
                statistics.fmean(epoch["seconds"] * epoch["waiting_share"] for epoch in later),
                statistics.fmean(epoch["origin_share"] for epoch in later),
                statistics.fmean(top1),
                statistics.stdev(top1),
                statistics.fmean(faster),
            )
        )
    return found


def conditions(result: dict[str, Any]) -> str:
    extent = result["extent"]
    size = f"{extent['training']:,} images, {extent['epochs']} epochs, {extent['seeds']} seeds"
    cached = f"{100 * result['cached_share']:.0f} % of the data cached"
    readers = f"{result['loader_workers']} loader workers on {result['machine']['cores']} cores"
    return f"{size}; source {result['latency_ms']:g} ms away; {cached}; {readers}"


def draw(shown: list[Bar], text: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time, traffic) = pyplot.subplots(1, 2, figsize=(11, 3.4), layout="constrained", sharey=True)
    names = [bar.name for bar in shown]
    computing = [bar.seconds - bar.waiting_seconds for bar in shown]
    time.barh(names, computing, color=COMPUTING, label="computing")
    time.barh(names, [bar.waiting_seconds for bar in shown], left=computing, color=WAITING, label="waiting for data")
    for bar in shown:
        faster = "" if bar is shown[0] else f", {bar.times_as_fast:.1f} times as fast"
        time.text(bar.seconds + 0.1, bar.name, f"{bar.seconds:.1f} s{faster}", va="center", fontsize=9)
    time.set(title="time of an epoch, s", xlim=(0, 1.22 * max(bar.seconds for bar in shown)))
    time.legend(frameon=False, loc="lower right", fontsize=9)
    traffic.barh(names, [bar.origin_share for bar in shown], color=BYTES)
    for bar in shown:
        note = f"{bar.origin_share:.2f}; top-1 {100 * bar.top1:.1f} ± {100 * bar.top1_deviation:.1f} %"
        traffic.text(bar.origin_share + 0.01, bar.name, note, va="center", fontsize=9)
    traffic.set(title="bytes read from the source in an epoch, in data sets", xlim=(0, 1.55))
    for axis in (time, traffic):
        axis.spines[["top", "right"]].set_visible(False)
    time.invert_yaxis()
    figure.supxlabel(text, fontsize=9, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    result = json.loads(RESULT.read_text())
    shown = bars(result)
    for bar in shown:
        print(
            f"{bar.name}: {bar.seconds:.1f} s an epoch, {bar.waiting_seconds:.1f} s of it waiting, "
            f"{bar.times_as_fast:.1f} times as fast, {bar.origin_share:.2f} data sets read, "
            f"top-1 {100 * bar.top1:.1f} ± {100 * bar.top1_deviation:.1f} %"
        )
    print(conditions(result))
    draw(shown, conditions(result), PICTURE)


if __name__ == "__main__":
    main()
