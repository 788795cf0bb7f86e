"""Replays against closed forms, and the command around them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgpack
import numpy as np
import pytest
from click.testing import CliRunner

from spiderfs.cli.main import main
from spiderfs.core.engine import Engine
from spiderfs.core.events import AtHand, Epoch, Labels, Ratio, Scored
from spiderfs.core.policy import Hub, HubLimits, Key
from spiderfs.policies import POLICIES
from spiderfs.policies.baselines import LRU, MinIO
from spiderfs.policies.spider import Spider
from spiderfs.simulation import policy_for, replay
from spiderfs.trace import FORMAT, VERSION, Accesses, TraceWriter, read_trace


def test_counts_per_epoch() -> None:
    accesses = Accesses.of([1, 2, 1, 3, 3], [10, 20, 10, 30, 30])
    assert (accesses.distinct, accesses.distinct_bytes) == (3, 60)
    result = replay(Engine(MinIO(), 30), accesses, 2)
    assert result.opens.tolist() == [2, 2, 1]
    assert result.hits.tolist() == [0, 1, 0]
    assert result.served_bytes.tolist() == [30, 40, 30]
    assert result.origin_bytes.tolist() == [30, 30, 30]
    assert result.coverage.tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert result.hit_ratio == pytest.approx(1 / 5)
    assert result.warm_hit_ratio == pytest.approx(1 / 3)
    assert result.origin_bytes_per_sample == 18


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_serves_more_of_a_permutation_than_it_held(name: str) -> None:
    rng = np.random.default_rng(3)
    keys = [int(key) for _ in range(4) for key in rng.permutation(200)]
    size_of = rng.integers(1, 1000, 200)
    accesses = Accesses.of(keys, size_of[keys].tolist())
    engine = Engine(policy_for(POLICIES[name], accesses), int(size_of.sum()) // 3)
    result = replay(engine, accesses, 200)
    assert max(result.served_bytes - result.origin_bytes) <= engine.budget_bytes


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace"
    writer = TraceWriter(path)
    for epoch in range(3):
        for key in np.random.default_rng(epoch).permutation(50).tolist():
            writer.append(0, key, 100, served=epoch > 0 and key < 25)
    writer.append(0, 99, 100, block=1)
    writer.close()
    return path


def spider_run(path: Path) -> list[tuple[bool, Key | None]]:
    """Record what a mount would of a training of three epochs; whether each open hit, and its substitute."""
    rng = np.random.default_rng(5)
    policy = Spider(0.6, HubLimits(substitutions=3))
    engine = Engine(policy, 2000)
    writer = TraceWriter(path)
    weights, label = np.ones(100), rng.integers(0, 4, 100)
    outcomes: list[tuple[bool, Key | None]] = []
    writer.event(0, Labels("1", dict(enumerate(label.tolist()))))
    for epoch in range(3):
        policy.new_epoch("1")
        policy.set_ratio(ratio := (0.6, 0.55, 0.5)[epoch])
        engine.settle()
        writer.event(0, Epoch("1"))
        writer.event(0, Ratio(ratio))
        for batch in rng.choice(100, (10, 10), p=weights / weights.sum()).tolist():
            for key in batch:
                hit, hub = key in engine.members, policy.substitute_for("1", key)
                outcomes.append((hit, hub))
                if hub is None:
                    engine.opened(key, 100)
                    writer.append(0, key, 100, served=hit, list_number=1)
                else:
                    policy.substituted("1", hub, key)
                    engine.opened(hub, 100)
                    writer.redirect(0, key, 100, int(str(hub)), 100, list_number=1)
            for key in batch:
                weights[key] = rng.uniform(0.05, 1.5)
                policy.scored(key, weights[key])
                writer.event(0, Scored("1", [key], [weights[key]]))
            alike = np.flatnonzero(label == label[batch[0]]).tolist()[:12]
            hub_found = Hub(batch[0], "1", alike, [0.01 * key for key in alike])
            policy.hub_found(hub_found)
            engine.place(batch[0], 100)
            writer.event(0, AtHand(batch[0], 100))
            writer.event(0, hub_found)
    writer.close()
    return outcomes


def test_spider_is_replayed_exactly(tmp_path: Path) -> None:
    outcomes = spider_run(tmp_path / "trace")
    trace = read_trace(tmp_path / "trace")
    engine = Engine(Spider(hub_limits=HubLimits(substitutions=3)), 2000)
    result = replay(engine, trace.accesses(), 1, trace.hints())
    assert result.hits.tolist() == [int(hit or hub is not None) for hit, hub in outcomes]
    assert result.redirects.tolist() == [int(hub is not None) for _, hub in outcomes]
    assert 20 < result.redirects.sum() < result.hits.sum() < 290
    assert result.hit_ratio == pytest.approx(trace.served_ratio())
    # The same hints mean nothing to others, and less to one with less room.
    assert replay(Engine(LRU(), 2000), trace.accesses(), 300, trace.hints()).redirects.tolist() == [0]
    assert replay(Engine(Spider(), 500), trace.accesses(), 300, trace.hints()).hit_ratio < result.hit_ratio


def test_command_varies_the_ratio(tmp_path: Path) -> None:
    spider_run(tmp_path / "trace")
    redirects = []
    for options in ([], ["--ratio", 1], ["--ratio", 0.95]):
        report_path = tmp_path / "report.json"
        code, output = run(
            tmp_path / "trace", "--policy", "spider", "--capacity", 2000, "--json", report_path, *options
        )
        assert code == 0, output
        row = json.loads(report_path.read_text())["results"][0]
        assert sum(epoch["redirects"] for epoch in row["epochs"]) == row["redirects"]
        redirects.append(row["redirects"])
    assert redirects[1] == 0 < redirects[2] < redirects[0]


def run(*arguments: object, columns: int = 200) -> tuple[int, str]:
    # Rich takes the width of its table from here.
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(main, ["simulate", *map(str, arguments)])
    return result.exit_code, result.output


def test_command_compares_policies(trace: Path, tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    code, output = run(trace, "--policy", "lru, minio", "--capacity", "20%,2kB", "--epoch", 50, "--json", report_path)
    assert code == 0, output
    assert "belady (bound)" in output
    assert "33.1% did not wait" in output
    report = json.loads(report_path.read_text())
    assert (report["accesses"], report["distinct"], report["distinct_bytes"]) == (151, 51, 5100)
    rows = [(row["capacity"], row["policy"]) for row in report["results"]]
    assert rows == [(capacity, policy) for capacity in ("20%", "2kB") for policy in ("lru", "minio", "belady")]
    assert [epoch["hits"] for epoch in report["results"][1]["epochs"]] == [0, 10, 10, 0]


def test_a_terminal_of_80_columns_has_room_for_each_figure(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("".join(f"{key} 123456789\n" for _ in range(30) for key in range(100)))
    code, output = run(path, columns=80)
    assert code == 0
    assert "344.9 GiB" in output
    assert "…" not in output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--policy", "clock"], "there is no policy 'clock'"),
        (["--capacity", "120%"], "capacity: "),
        (["--capacity", "10%,"], "capacity: "),
        (["--json", "/nonexistent/x"], "cannot write"),
        (["--ratio", "nan"], "no number"),
        (["--neighbours", "9" * 30], "1000000"),
    ],
)
def test_command_complains_in_one_line(trace: Path, options: list[str], complaint: str) -> None:
    code, output = run(trace, *options)
    assert code != 0
    assert complaint in output.splitlines()[-1]


def test_a_damaged_trace_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    head = msgpack.packb({"format": FORMAT, "version": VERSION, "options": 0})
    path.write_bytes(head + random.Random(1).randbytes(32_000))
    for options in ([], ["--radius", "nearest"]):
        code, output = run(path, *options)
        assert (code, len(output.splitlines())) == (1, 1)
        assert output.startswith("spiderfs: ")
        assert "is damaged at record" in output


def test_what_is_no_file_is_one_line_and_read_no_further() -> None:
    code, output = run("/dev/zero")
    assert (code, len(output.splitlines())) == (1, 1)
    assert "is not a regular file" in output


@pytest.mark.parametrize("length", [151, 10**30])
def test_an_epoch_longer_than_the_trace_is_all_of_it(trace: Path, tmp_path: Path, length: int) -> None:
    report = tmp_path / "report"
    code, output = run(trace, "--policy", "lru", "--epoch", length, "--json", report)
    assert code == 0, output
    assert json.loads(report.read_text())["epoch_length"] == 151
