"""README.md is short, begins with what a newcomer does, and says figures that the repository's own command prints."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

from benchmarks import tables
from benchmarks.training.train_report import against_baseline

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "README.md").read_text()
# Without the table of results.
MOST_WORDS = 640


def test_it_is_short_and_begins_with_an_install_and_the_question_whether_it_helps() -> None:
    assert len(re.sub(r"<!-- table.*?<!-- end -->", "", TEXT, flags=re.DOTALL).split()) <= MOST_WORDS
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    first = blocks[0].splitlines()
    assert first[-4:] == [
        "pip install '.[hook]'",
        "spiderfs demo",
        "spiderfs doctor /nfs/imagenet",
        "spiderfs bench /nfs/imagenet",
    ]


def test_tables_are_the_kept_results_and_stand_in_one_document_each() -> None:
    """`python -m benchmarks.all --tables` writes them."""
    for path in tables.documents():
        text = path.read_text()
        assert tables.renewed(text) == text, path
    found = [name for path in tables.documents() for name in tables.names_in(path.read_text())]
    assert sorted(found) == sorted(tables.TABLES)


def test_its_figures_are_kept_results() -> None:
    result = tables.kept("train")
    runs = tables.runs_of(result)
    times = [lru / planned for planned, lru in against_baseline(runs, "uniform+plan", "seconds")]
    text = f"**{statistics.fmean(times):.1f} times as fast as with an LRU cache of the same size**"
    assert text in " ".join(TEXT.split())
    assert len(times) == 3
    assert all(planned == lru for planned, lru in against_baseline(runs, "uniform+plan", "top1")), "the same accuracy"
    hits = statistics.fmean(
        epoch["hit_ratio"] for run in result["runs"] if run["configuration"] == "lru" for epoch in run["epochs"][1:]
    )
    assert f"({hits:.0%} hits)" in TEXT
    assert (result["loader_workers"], result["cached_share"]) == (2, 0.2)
    formats = json.loads((ROOT / "docs/results/streaming_formats.json").read_text())
    case = formats["cases"]["fifth"]
    assert (case["latency_ms"], case["cached_share"], formats["machine"]["cores"]) == (20, 0.2, 2)
    assert f"{formats['images']:,} photos of {formats['bytes'] / formats['images'] / 1000:.0f} kB" in TEXT
    # The shares of native speed under "When not to use it".
    performance = (ROOT / "docs/results/README.md").read_text()
    one, four = (
        re.search(rf"^\| 2,000 x 112 kB, {readers} \| [\d.]+ \(.*\| ([\d.]+)[^|]*\|$", performance, re.MULTILINE)
        for readers in (1, 4)
    )
    assert one is not None
    assert four is not None
    immutable = re.findall(r"^\| 2,000 x 112 kB, \d \| ([\d.]+) \(at least 0\.6", performance, re.MULTILINE)
    cases = tables.kept("client")["cases"]
    around = [f"{tables.files_ratio(case, 'client.read_bytes', 'native'):.2f}" for case in cases]
    readme = " ".join(TEXT.split())
    assert f"runs at {percent(one[1])} (one reader) to {percent(four[1])} (four readers) of native speed" in readme
    assert f"at {percent(min(immutable))} to {percent(max(immutable))} with `immutable`" in readme
    assert f"at {percent(min(around))} to {percent(max(around))} with [`spiderfs.client`]" in readme


def percent(share: str) -> str:
    return f"{float(share):.0%}"
