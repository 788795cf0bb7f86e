"""The figures of a mount as people read them: rows of their own for some, rows by name for any component."""

from __future__ import annotations

from typing import Any

import pytest

from spiderfs.cli import figures

PLAN = {"trainer": 1, "list": "two\nlines", "epoch": 0, "taken": 4, "length": 10, "ready_s": 1.5, "late_share": 0.125}
JOB = {"job": "one", "name": "my\nloop", "epoch": 2, "epochs": 90, "samples": 2, "hits": 1, "samples_per_s": 0.2}


def text(rows: Any) -> str:
    return "\n".join(map(str, rows))


def test_a_name_of_a_trainers_adds_no_line_to_a_page() -> None:
    page = text(figures.all_rows({"plans": [PLAN], "jobs": [JOB]}))
    assert "plan             two\\x0alines, epoch 0: 4 of 10, 1.5 s ready ahead, 12.5% late\n" in page
    assert "job              my\\x0aloop: epoch 2 of 90, 0.2 samples/s, 50.0% hits\n" in page
    assert (
        text(figures.section("plans", [PLAN]))
        .splitlines()[1]
        .endswith("trainer 1, list two\\x0alines, epoch 0, taken 4, length 10, ready 1.5 s, late share 12.5%")
    )


def test_a_plan_that_is_left_or_ignored_has_no_figures_of_its_reads() -> None:
    (left,) = figures.plans({"plans": [PLAN | {"taken": 0, "length": 0}]})
    assert left.text == "two\\x0alines, epoch 0: left before its end"
    (ignored,) = figures.plans({"plans": [PLAN | {"trusted": False}]})
    assert ignored.text.endswith("epoch 0: 4 of 10, not followed, so the mount ignores it")
    assert ignored.bad


def test_a_component_that_no_one_has_met_is_shown_by_its_names() -> None:
    status = {"fill_share": 0.5, "held_bytes": 3 << 20, "oldest_s": 0.25, "bytes_per_s": 1024.0, "count": 12345}
    status |= {"pid": 12345, "on": True, "limit": None, "ranks": [0, 1], "parts": [{"name": "a"}], "of": {"x": 1.23456}}
    assert text(figures.all_rows({"new_one": status})).split("new one")[1].splitlines()[:4] == [
        "          fill share 50.0%, held 3.0 MiB, oldest 250.0 ms, bytes per s 1.0 KiB/s, count 12,345,"
        " pid 12345, on yes, ranks 0 and 1",
        "  parts",
        "    1            name a",
        "  of             x 1.235",
    ]


def test_a_figure_of_the_name_of_its_component_is_named_once() -> None:
    assert text(figures.section("ratio", {"ratio": 0.9, "pinned": None})) == "ratio            90.0%"


def test_of_many_peers_those_are_shown_that_fail_most() -> None:
    known = {
        f"http://n{number}:8443": {
            "up": number != 150,
            "hits": 10,
            "bytes": 1024,
            "absent": 0,
            "timeouts": number % 100,
        }
        for number in range(200)
    }
    total, *shown, others = figures.peers({"peers": known}, 16)
    assert (total.name, total.text) == ("from peers", "200.0 KiB in 2,000 reads")
    assert [row.name.strip() for row in shown[:3]] == ["http://n150:8443", "http://n99:8443", "http://n199:8443"]
    assert (shown[0].text[:6], shown[0].bad) == ("down, ", True)
    assert len(shown) == 16
    assert (others.name, others.text) == ("  184 others", "better than these; of all 200, 1 down")
    few = dict(list(known.items())[:3])
    assert [row.name.strip() for row in figures.peers({"peers": few}, 16)][1:] == list(few)
    (none,) = figures.peers({"peers": {}, "is_member": True}, 16)
    assert none.text == "no other node is known"


@pytest.mark.parametrize(
    ("metrics", "row"),
    [
        ({"opens": 0}, "0"),
        ({"opens": 40, "hit_ratio": 0.5}, "40, 50.0% hits"),
        (
            {"opens": 40, "page_cache_reads": 1900, "hit_ratio": 0.979},
            "1,940, 97.9% hits, 1,900 answered by the page cache",
        ),
    ],
)
def test_opens_and_what_the_page_cache_answered_are_one_figure(metrics: dict[str, float], row: str) -> None:
    (found,) = figures.opens({"metrics": metrics})
    assert found.text == row


def test_troubles_are_named() -> None:
    metrics = {"source_reachable": 0.0, "worker_restarts": 2, "opens": 7}
    assert text(figures.remarks({"metrics": metrics})).splitlines() == [
        "source           does not answer",
        "troubles         2 worker restarts",
    ]
    assert text(figures.remarks({})) == "troubles         none"
