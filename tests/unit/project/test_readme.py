"""README.md is short, begins with what a newcomer does, and says figures that the repository's own command prints."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

from benchmarks.training.headline import RESULT, bars

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "README.md").read_text()
MOST_WORDS = 700


def test_it_is_short() -> None:
    assert len(TEXT.split()) <= MOST_WORDS


def test_it_begins_with_an_install_and_the_question_whether_it_helps() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    first = blocks[0].splitlines()
    assert first[-4:] == [
        "pip install '.[hook]'",
        "spiderfs demo",
        "spiderfs doctor /nfs/imagenet",
        "spiderfs bench /nfs/imagenet",
    ]


def test_it_names_near_its_top_both_commands_that_do_all_of_the_set_up() -> None:
    top = TEXT.split("\n## ")[1]
    (told,) = [" ".join(part.split()) for part in top.split("\n\n") if "scripts/test" in part]
    assert re.findall(r"`(scripts/\w+)` \([^)]*\b\d+ minutes\)", told) == ["scripts/demo", "scripts/test"]
    for what in (
        "apt",
        "fuse3",
        "iproute2",
        "compiler",
        "headers",
        "`.venv-dev`",
        "`requirements.lock`",
        "torch",
        "GB",
    ):
        assert what in told, what


ROWS = {
    "straight from the source": ("fifth", "direct"),
    "spiderfs": ("fifth", "spiderfs"),
    "**spiderfs with a plan**": ("fifth", "planned"),
    "**the same with `immutable`**": ("fifth", "immutable planned"),
    "LitData, from shards made beforehand": ("fifth", "litdata"),
    "the local disk": ("local", "direct"),
}


def test_its_table_is_the_kept_result() -> None:
    result = json.loads((ROOT / "docs/results/streaming_formats.json").read_text())
    case = result["cases"]["fifth"]
    assert (case["latency_ms"], case["cached_share"], result["machine"]["cores"]) == (20, 0.2, 2)
    assert f"{result['images']:,} photos of {result['bytes'] / result['images'] / 1000:.0f} kB" in TEXT
    for name, (case, system) in ROWS.items():
        readings = result["readings"][case][system]
        cells = [statistics.median(reading[epoch] for reading in readings) for epoch in ("first", "second")]
        assert f"| {name} | {cells[0]:,.0f} | {cells[1]:,.0f} |" in TEXT


def test_the_first_page_of_the_site_shows_the_same() -> None:
    page = (ROOT / "docs/index.md").read_text()
    rows = re.findall(r"^\| .* \| [\d,]+ \| [\d,]+ \|$", page, re.MULTILINE)
    assert len(rows) == 4
    assert [row for row in rows if row not in TEXT] == []
    assert len(re.findall(r"^(?:pip|spiderfs) ", page, re.MULTILINE)) == 4


def test_what_a_training_gains_is_the_kept_result() -> None:
    result = json.loads(RESULT.read_text())
    baseline, planned, *_ = bars(result)
    assert f"**{planned.times_as_fast:.1f} times as fast as with an LRU cache of the same size**" in " ".join(
        TEXT.split()
    )
    assert planned.top1 == baseline.top1, "the README says that the accuracy is the same"
    hits = statistics.fmean(
        epoch["hit_ratio"] for run in result["runs"] if run["configuration"] == "lru" for epoch in run["epochs"][1:]
    )
    assert f"({hits:.0%} hits)" in TEXT
    assert (result["loader_workers"], result["cached_share"]) == (2, 0.2)


def test_what_samplers_cost_is_the_kept_result() -> None:
    """Points of top-1 less than uniform sampling of the same seed."""
    spider, echo = lost("equivalence.json", 12, "weights + coverage 0.3 + settled 0.25", "echo 2")
    training = (ROOT / "docs/results/README.md").read_text()
    assert f"| weights + coverage 0.3 + settled 0.25 | 0.44 / 0.51 | 49.9 ± 1.1 | -{spider} [" in training
    assert f"| echo 2 | 0.44 / 0.55 | 50.7 ± 0.9 | -{echo} [" in training


def test_the_table_at_full_size_is_the_kept_result() -> None:
    training = (ROOT / "docs/results/README.md").read_text().partition("\n## Full size\n")[2].partition("\n## ")[0]
    kept = json.loads((ROOT / "docs/results/full_size.json").read_text())["measured"]
    assert {run["seed"] for run in kept} == {1}
    for run in kept:
        fetched = sum(epoch["origin_bytes_per_sample"] * epoch["reads_share"] for epoch in run["epochs"])
        row = re.search(
            rf"^\| \**{re.escape(run['system'])}\** \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|", training, re.MULTILINE
        )
        assert row is not None, run["system"]
        assert row.groups() == (f"{fetched / run['mean_bytes']:.2f}", f"{100 * run['top1']:.1f}")


def lost(file: str, seeds: int, *names: str) -> list[str]:
    """What these configurations lost on average over all their seeds, of which there are so many."""
    top1: dict[str, dict[int, float]] = {}
    for run in json.loads((ROOT / "docs/results" / file).read_text())["runs"]:
        top1.setdefault(run["configuration"], {})[run["seed"]] = 100 * run["top1"]
    assert {len(top1[name]) for name in names} == {seeds}
    means = (statistics.fmean(top1["uniform"][seed] - top1[name][seed] for seed in top1[name]) for name in names)
    return [f"{mean:.1f}" for mean in means]


def test_its_figures_of_serving_are_kept_results() -> None:
    """The shares of native speed under "When not to use it"."""
    performance = (ROOT / "docs/results/README.md").read_text()
    one, four = (
        re.search(rf"^\| 2,000 x 112 kB, {readers} \| [\d.]+ \(.*\| ([\d.]+)[^|]*\|$", performance, re.MULTILINE)
        for readers in (1, 4)
    )
    assert one is not None
    assert four is not None
    immutable = re.findall(r"^\| 2,000 x 112 kB, \d \| ([\d.]+) \(at least 0\.6", performance, re.MULTILINE)
    client = (ROOT / "docs/reference/client.md").read_text()
    around = re.findall(r"`read_bytes` \|.*\| ([\d.]+) \| [\d.]+ \|$", client, re.MULTILINE)
    text = " ".join(TEXT.split())
    assert f"runs at {percent(one[1])} (one reader) to {percent(four[1])} (four readers) of native speed" in text
    assert f"at {percent(min(immutable))} to {percent(max(immutable))} with `immutable`" in text
    assert f"at {percent(min(around))} to {percent(max(around))} with [`spiderfs.client`]" in text


def percent(share: str) -> str:
    return f"{float(share):.0%}"
