"""`spiderfs report`: what the page says of epochs and of a trace, that it needs nothing else, and how it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from commands import looks_mounted, refusal, spiderfs

from spiderfs.cli.report import _options

EPOCH = {"job": "1f", "name": "<b>best", "epoch": 0, "ended": 1e9, "seconds": 75.0, "samples": 1000, "waited": 250}
EPOCH |= {"waited_s": 12.5, "planned": 800, "late": 8, "page_cache_reads": 0, "substitutes": 7, "read_bytes": 3 << 30}
EPOCH |= {"origin_bytes": 1 << 30}
LATER = {**EPOCH, "epoch": 1, "seconds": 30.0, "waited": 0, "late": 0, "waited_s": 0.0, "origin_bytes": 0}
OTHER = {**EPOCH, "job": "2a", "name": None, "ended": 2e9, "planned": 0, "late": 0}
# Four samples of 10 bytes, three times.
TRACE = "a 10\nb 10\nc 10\nd 10\n" * 3


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that looks like a mount which records a trace."""
    stats = {"source": "s3://a/<b>", "policy": "lru", "used_bytes": 10, "capacity_bytes": 20}
    point = looks_mounted(monkeypatch, tmp_path, stats__json=json.dumps(stats))
    (tmp_path / "trace").write_text(TRACE)
    has(point, [EPOCH, LATER, OTHER], tmp_path / "trace")
    return point


def has(point: Path, epochs: Sequence[Mapping[str, Any]], trace: Path | str) -> None:
    (point / ".spiderfs/epochs").write_text("".join(f"{json.dumps(epoch)}\n" for epoch in epochs))
    (point / ".spiderfs/config").write_text(f"policy=lru  # what ranks\ntrace={trace}  # record\n")


class Page(HTMLParser):
    """Its words, and whether all that it opens it closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not any(name in ("src", "href") for name, _ in attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("line", "rect")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data.split()


def test_the_page_says_all_that_is_known(here: Path, tmp_path: Path) -> None:
    result = spiderfs("report", here, "--html", tmp_path / "r.html")
    assert (result.exit_code, result.stdout) == (0, f"wrote 3 epochs to {tmp_path}/r.html\n"), result.output
    text = (tmp_path / "r.html").read_text()
    assert "http" not in text
    assert "url(" not in text
    page = Page(text)
    assert page.open == []
    words = " ".join(page.words)
    for said in (
        "s3://a/<b> with policy lru, 10 B of 20 B cached.",
        "Training run <b>best 2 epochs, 1 min 45 s in all. Of 2,000 reads, 87.5% did not wait for the source; the"
        " others waited 12.5 s in total. 1.0 GiB came from the source for 6.0 GiB read. 1,600 reads were"
        " planned, and 0.5% of these were late.",
        "0 1 min 15 s 1,000 75.0% 12.5 s 1.0% 7 3.0 GiB 1.0 GiB",
        "Training run 2a 1 epoch, ",
        "No plan was followed: with trainer_hook.plan",
        "time, largest: 1 min 15 s",
        "12 accesses to 4 samples, 40 bytes in all; 3 epochs of 4 accesses",
        "belady (bound) 20 B",
        "lru, as mounted 20 B 0.0% 0.0% 0 120 B",
    ):
        assert said in words, said
    assert words.index("Training run 2a") < words.index("Training run <b>best"), "the latest comes first"
    assert re.search(r'<tr class="own"><td>lru, as mounted</td><td>20 B</td>', text)


@pytest.mark.parametrize(("waited_s", "said"), [(0.2, True), (0.3, False)])
def test_a_source_that_answers_at_once_is_named(here: Path, tmp_path: Path, waited_s: float, said: bool) -> None:
    has(here, [{**EPOCH, "waited_s": waited_s}], "none")
    spiderfs("report", here, "--html", tmp_path / "r.html")
    words = "A read that waited took 0.8 ms: without a mount, reading this source may be as fast."
    assert (words in (tmp_path / "r.html").read_text()) is said


def test_without_a_trace_it_says_how_to_learn_more(here: Path, tmp_path: Path) -> None:
    has(here, [EPOCH], "none")
    assert spiderfs("report", here, "--html", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text()
    assert "in a later report, mount with -o trace=FILE" in text
    assert f"<code>spiderfs report {here}</code>" in text
    charts = ["time", "bytes from the source", "hits", "waits of all readers", "late, of planned reads"]
    assert re.findall(r">([^<]*), largest: ", text) == charts
    # Nothing came from the source: these figures have no chart.
    has(here, [LATER], "none")
    assert spiderfs("report", here, "--html", tmp_path / "r.html").exit_code == 0
    assert re.findall(r">([^<]*), largest: ", (tmp_path / "r.html").read_text()) == ["time", "hits"]


def test_a_trace_that_cannot_be_read_takes_nothing_from_the_epochs(here: Path, tmp_path: Path) -> None:
    has(here, [EPOCH], tmp_path / "gone")
    result = spiderfs("report", here, "--html", tmp_path / "r.html")
    assert result.exit_code == 0
    assert result.stderr == (
        f"spiderfs: warning: cannot read the trace {tmp_path}/gone: No such file or directory; so the page does not"
        " compare other options\n"
    )
    has(here, [], tmp_path / "gone")
    assert "cannot read the trace" in refusal("report", here, "--html", tmp_path / "r2.html")


def test_without_trainings_a_trace_is_enough(here: Path, tmp_path: Path) -> None:
    has(here, [], tmp_path / "trace")
    assert spiderfs("report", here, "--html", tmp_path / "r.html").exit_code == 0
    (tmp_path / "trace").write_text("")
    assert "is empty so far: the mount writes to it" in refusal("report", here, "--html", tmp_path / "r.html")
    has(here, [], "none")
    assert refusal("report", here, "--html", tmp_path / "r.html") == (
        f"spiderfs: {here} has seen no training yet, and records no trace: call trainer_hook.plan in the training, or"
        " mount with -o trace=FILE\n"
    )


def test_the_page_is_utf_8_where_the_locale_is_another(here: Path, tmp_path: Path) -> None:
    has(here, [EPOCH], "none")
    there, table = here.rename(tmp_path / "é"), tmp_path / "mountinfo"
    table.write_text(table.read_text().replace(str(here), str(there)))
    run = f"import pathlib; from spiderfs.linux import mounts; mounts.MOUNT_TABLE = pathlib.Path({str(table)!r})"
    run += "; from spiderfs.cli.main import main; main()"
    arguments = ["report", there, "--html", tmp_path / "page.html"]
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", run, *arguments], check=True, env=plain, timeout=60)
    assert f"Training runs at {there}" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_it_fails_in_one_line(here: Path, tmp_path: Path) -> None:
    assert "cannot write" in refusal("report", here, "--html", tmp_path / "no/such/r.html")
    assert (
        refusal("report", here, "--html", "/dev/full") == "spiderfs: cannot write /dev/full: No space left on device\n"
    )
    assert "no spiderfs mount is at" in refusal("report", tmp_path, "--html", tmp_path / "r.html")
    assert spiderfs("report", here).exit_code == 2
    assert spiderfs("report", here, "--html", tmp_path).exit_code == 2
    (here / ".spiderfs/epochs").write_text("no JSON\n")
    assert "has a daemon of another version of spiderfs" in refusal("report", here, "--html", tmp_path / "r.html")
    (here / ".spiderfs/epochs").unlink()
    assert "cannot be used" in refusal("report", here, "--html", tmp_path / "r.html")


def test_a_replay_with_plans_is_the_one_as_mounted(tmp_path: Path) -> None:
    row = {"hit_ratio": 0.1, "warm_hit_ratio": 0.1, "origin_bytes": 5, "capacity_bytes": 20, "capacity": "20"}
    rows = [row | {"policy": "spider", "redirects": 7}, row | {"policy": "belady", "redirects": 0}]
    shared = {
        "accesses": 4, "distinct": 2, "distinct_bytes": 8, "epoch_length": 2, "served_ratio_when_recorded": 0.999,
        "nodes": 1, "scorings": [], "results": [row | {"epochs": [{"coverage": 1.0}]} for row in rows],
    }  # fmt: skip
    stats = {"policy": "spider", "capacity_bytes": 20}
    text = _options([shared | {"plans": False}, shared | {"plans": True}], stats)
    without, _, with_plans = text.partition("<h3>With the plans of the training run</h3>")
    assert "<h3>Without the plans of the training run</h3>" in without
    assert "as mounted" not in without
    assert "spider, as mounted" in with_plans
    assert "spider, as mounted" in _options([shared | {"plans": False}], stats)
    # 99.9% did not wait, and 10% of what was read was still held: the page says why both are true.
    assert "When it was recorded, 99.9% did not wait" in text
    assert text.count("Hits are here the reads of samples that the cache still held") == 2
    # A policy with substitutes may have more hits than the bound, which has none.
    assert "belady has none, so a policy with substitutes may have more hits" in text
    assert "<td>7</td>" in text
