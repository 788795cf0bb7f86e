"""What the batches of a trace are scored again to: with the mount's settings the same, with others another thing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from spiderfs.cli.main import main
from spiderfs.core.events import AtHand, Candidates, Epoch, Labels, Ratio, Scored
from spiderfs.core.policy import Hub
from spiderfs.scorer import SCORINGS
from spiderfs.scorer.scoring import ScorerOptions
from spiderfs.simulation import rescored
from spiderfs.trace import TracedBatch, TraceWriter, read_trace

SAMPLES, CLASSES, DIMENSION, BATCH, SIZE = 120, 3, 16, 12, 100
# Samples are known by inodes that are in no order.
INODES = np.random.default_rng(5).permutation(10_000)[:SAMPLES].astype(np.uint64)
LABELS = np.arange(SAMPLES) % CLASSES
# A training of another manager, or of a program that is not spiderfs' own, may give lists any numbers.
LIST = 7


def training(path: Path, scoring: str = "graph", options: ScorerOptions | None = None, epochs: int = 4) -> None:
    """Record a training as a mount does: embeddings of a class gather around a point of their own while it goes on."""
    rng = np.random.default_rng(11)
    scorer = SCORINGS[scoring](LABELS, DIMENSION, options or ScorerOptions())
    centres = rng.standard_normal((CLASSES, DIMENSION))
    writer = TraceWriter(path)
    writer.event(0, Labels(str(LIST), dict(zip(INODES.tolist(), LABELS.tolist(), strict=True))))
    for epoch in range(epochs):
        for places in rng.choice(SAMPLES, (SAMPLES // BATCH, BATCH)):
            for place in places.tolist():
                writer.append(0, int(INODES[place]), SIZE, served=False, list_number=LIST)
            noise = rng.standard_normal((BATCH, DIMENSION))
            embeddings = ((epoch + 1) * centres[LABELS[places]] + 2 * noise).astype(np.float16)
            losses = rng.random(BATCH).astype(np.float16)
            found = scorer.batch(places, embeddings.astype(np.float32), losses.astype(np.float32))
            writer.event(0, Ratio(0.5))
            writer.event(0, TracedBatch(str(LIST), INODES[places], embeddings, losses))
            writer.event(0, Scored(str(LIST), INODES[found.ids].tolist(), found.scores.tolist()))
            if (hub := next(found.hubs(), None)) is not None:
                neighbours = INODES[hub.neighbours].tolist()
                writer.event(0, AtHand(int(INODES[hub.id]), SIZE))
                writer.event(0, Hub(int(INODES[hub.id]), str(LIST), neighbours, hub.distances.tolist()))
        scorer.new_epoch()
        writer.event(0, Epoch(str(LIST), 0.5))
        writer.event(0, Ratio(0.5))
    writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


@pytest.mark.parametrize(
    ("scoring", "options"),
    [
        ("graph", ScorerOptions()),
        ("graph", ScorerOptions(radius=0.7)),
        ("graph", ScorerOptions(radius="class")),
        ("graph", ScorerOptions(radius=5.0, embeddings="raw")),
        ("graph", ScorerOptions(neighbours=9, index="hnsw")),
        ("rank", ScorerOptions()),
        ("loss", ScorerOptions()),
    ],
    ids=str,
)
def test_the_same_settings_find_the_same_again(path: Path, scoring: str, options: ScorerOptions) -> None:
    training(path, scoring, options)
    trace = read_trace(path)
    found = rescored(trace, scoring, options)
    # This training took the best sample of each batch for its hub.
    best = [(at, hint.hubs[0] if isinstance(hint, Candidates) else hint) for at, hint in found.hints]
    assert best == [(at, hint) for at, hint in trace.hints() if not isinstance(hint, AtHand)]
    assert sum(len(hint.keys) for _, hint in found.hints if isinstance(hint, Scored)) > SAMPLES
    assert any(isinstance(hint, Candidates) for _, hint in found.hints) == (scoring == "graph")
    assert list(found.described) == [str(LIST)]


def test_batches_that_were_scored_together_have_a_hub_each(path: Path) -> None:
    vectors = np.random.default_rng(1).standard_normal((SAMPLES, 4)).astype(np.float16)
    some = [range(40), range(20, 60), range(60, 80)]
    writer = TraceWriter(path)
    writer.event(0, Labels(str(LIST), dict(zip(INODES.tolist(), LABELS.tolist(), strict=True))))
    for number, places in enumerate(some):
        writer.event(0, TracedBatch(str(LIST), INODES[places], vectors[places], None, goes_on=number > 0))
    writer.close()
    options = ScorerOptions(radius=1.5)
    _, (_, scored), *hubs = rescored(read_trace(path), "graph", options).hints
    wanted = SCORINGS["graph"](LABELS, 4, options).batch(
        np.concatenate(some), np.concatenate([vectors[places] for places in some]).astype(np.float32)
    )
    assert isinstance(scored, Scored)
    assert (scored.keys, scored.scores) == (INODES[wanted.ids].tolist(), wanted.scores.tolist())
    found = [[hub.key for hub in hint.hubs] for _, hint in hubs if isinstance(hint, Candidates)]
    best = [int(INODES[hub.id]) for hub in wanted.hubs()]
    assert len(found) == len(hubs) == 3
    assert sorted(key for keys in found for key in keys) == sorted(best)
    assert found[0][0] == best[0]
    # A sample that two batches have is the later one's.
    assert all(len({int(np.searchsorted([20, 60], place_of(key), "right")) for key in keys}) == 1 for keys in found)


def place_of(inode: int) -> int:
    return INODES.tolist().index(inode)


def test_a_list_that_is_declared_again_goes_on_and_a_changed_one_begins_again(path: Path) -> None:
    labels = dict(zip(INODES.tolist(), LABELS.tolist(), strict=True))
    changed = dict.fromkeys(labels, 0)
    vectors = np.random.default_rng(1).standard_normal((SAMPLES, 4)).astype(np.float16)
    writer = TraceWriter(path)
    for declared in (labels, labels, changed):
        writer.event(0, Labels(str(LIST), declared))
        writer.event(0, TracedBatch(str(LIST), INODES[:60], vectors[:60], None))
        writer.append(0, 1, 1)
        writer.event(0, Labels(str(LIST), declared))
        writer.event(0, TracedBatch(str(LIST), INODES[60:], vectors[60:], None))
        writer.append(0, 1, 1)
    writer.close()
    hints = rescored(read_trace(path), "graph", ScorerOptions(radius=0.5)).hints
    found = [[hint.scores for at, hint in hints if at == number and isinstance(hint, Scored)] for number in range(6)]
    scores = [[score for some in of_batches for score in some] for of_batches in found]
    assert scores[0] != scores[2], "the first half found neighbours in the second"
    assert scores[1] == scores[3]
    assert len(scores[4]) == 60
    assert scores[4] != scores[2]


# -- the command


def run(*arguments: object) -> tuple[int, str]:
    # Rich takes the width of its table from here.
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["simulate", *map(str, arguments)])
    return result.exit_code, result.output


def test_command_varies_the_radius(path: Path, tmp_path: Path) -> None:
    training(path)
    report_path = tmp_path / "report.json"
    code, output = run(
        *(path, "--policy", "lru,spider,shade", "--capacity", "30%", "--radius", "0.05,nearest,0.05,1"),
        *("--json", report_path),
    )
    assert code == 0, output
    report = json.loads(report_path.read_text())
    rows = {(row["policy"], row["radius"]): row for row in report["results"]}
    runs = [
        ("lru", None),
        ("spider", "0.05"),
        ("spider", "nearest"),
        ("spider", "1"),
        ("shade", None),
        ("belady", None),
    ]
    assert list(rows) == runs
    assert rows["spider", "0.05"]["redirects"] == 0 < rows["spider", "nearest"]["redirects"]
    assert {row["neighbours"] for (policy, _), row in rows.items() if policy == "spider"} == {500}
    same = {scoring["radius"]: scoring["scores_as_recorded"] / scoring["scores"] for scoring in report["scorings"]}
    # None: by losses, which this training was not scored by.
    assert same["nearest"] == 1
    assert max(same[radius] for radius in ("0.05", "1", None)) < 0.5
    assert report["accuracies_when_recorded"] == {str(LIST): [0.5] * 4}
    assert all(name in output for name in ("spider, 0.05 ", "spider, nearest ", "shade  "))
    assert "Scored again (graph, radius nearest), job dataset 7: radius 0." in output
    assert "Scored again (rank), job dataset 7: mean score" in output
    code, output = run(path, "--policy", "spider", "--capacity", "30%", "--json", report_path)
    assert "Scored again" not in output
    # The best sample of each batch was recorded as its hub; scored again, others become hubs too.
    assert 0 < json.loads(report_path.read_text())["results"][0]["redirects"] != rows["spider", "nearest"]["redirects"]
