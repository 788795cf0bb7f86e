"""Replays on several nodes, against closed forms, and the option of the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from spiderfs.cli.main import main
from spiderfs.core.engine import Engine
from spiderfs.policies.spider import Spider
from spiderfs.simulation import Replay, replay_on_nodes
from spiderfs.trace import Accesses

SAMPLES, EPOCHS = 2_000, 4


def permutations(seed: int = 3) -> list[int]:
    """Epochs that read each sample once; keys are hashes, as inodes are."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**62, SAMPLES)
    return [int(keys[index]) for _ in range(EPOCHS) for index in rng.permutation(SAMPLES)]


def on_nodes(nodes: int, room: int, keys: list[int]) -> Replay:
    accesses = Accesses.of(keys, [1] * len(keys))
    return replay_on_nodes(nodes, lambda size, homes: Engine(Spider(), size, homes=homes), room, accesses, SAMPLES)


@pytest.mark.parametrize(("nodes", "share"), [(2, 0.2), (4, 0.2), (8, 0.05), (8, 0.2)])
def test_the_caches_of_all_nodes_hold_the_sum_of_their_rooms(nodes: int, share: float) -> None:
    result = on_nodes(nodes, int(share * SAMPLES), permutations())
    assert result.origin_bytes[0] == SAMPLES, "each sample comes from the source once"
    held = min(1.0, nodes * share)
    # Nodes are the homes of somewhat more and fewer samples, and one file in fifty takes turns.
    assert result.origin_bytes[2:].mean() / SAMPLES == pytest.approx(1 - held, abs=0.06)
    assert result.hits[2:].mean() / SAMPLES == pytest.approx(held, abs=0.06)


def test_what_repeats_on_another_node_is_a_hit_at_its_home() -> None:
    # Of two nodes, each reads the sample in turn; the second time, the home has it.
    assert on_nodes(2, 10, [5, 5, 5, 5]).hits.tolist() == [3]
    assert on_nodes(2, 0, [5, 5, 5, 5]).hits.tolist() == [0]


def test_the_command_deals_a_trace_to_nodes(tmp_path: Path) -> None:
    trace, found = tmp_path / "trace.txt", tmp_path / "found.json"
    trace.write_text("".join(f"{key} 10\n" for key in permutations()))
    command = ["simulate", str(trace), "--policy", "spider", "--capacity", "10%", "--json", str(found)]
    later = {}
    for nodes in (1, 4):
        result = CliRunner().invoke(main, [*command, "--nodes", str(nodes)])
        assert result.exit_code == 0, result.output
        assert ("nodes with this capacity" in " ".join(result.output.split())) == (nodes > 1)
        report = json.loads(found.read_text())
        assert report["nodes"] == nodes
        later[nodes] = {row["policy"]: row["warm_hit_ratio"] for row in report["results"]}
    assert later[1]["spider"] <= 0.1 < 0.33 < later[4]["spider"] <= later[4]["belady"]


def test_recorded_plans_are_those_of_one_mount(tmp_path: Path) -> None:
    (tmp_path / "trace.txt").write_text("a 1\nb 1\n")
    result = CliRunner().invoke(main, ["simulate", str(tmp_path / "trace.txt"), "--nodes", "2", "--plans"])
    assert result.exit_code != 0
    assert "leave out --plans, or --nodes" in result.output
