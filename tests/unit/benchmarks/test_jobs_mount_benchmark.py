"""The benchmark of several trainings on one mount: what it runs, and how it compares times."""

from __future__ import annotations

from benchmarks.training.jobs_mount import FULL, MAKESPAN, SITUATIONS, SYSTEMS, Found, runs_of, sentences


def found(situation: str, system: str, epoch_s: float, makespan_s: float = 0.0) -> Found:
    return Found(situation, system, 3, 0.19, 0.27, 0.0, epoch_s, 1.0, makespan_s)


def test_systems_take_turns_and_change_their_order() -> None:
    runs = list(runs_of(FULL, [*SITUATIONS, MAKESPAN], SYSTEMS))
    first = [system for number, name, system in runs if name == "3 jobs" and number == 0]
    second = [system for number, name, system in runs if name == "3 jobs" and number == 1]
    assert sorted(first) == sorted(second) == sorted(SYSTEMS)
    assert first != second
    assert {name for number, name, _ in runs if number} == {"1 job", "3 jobs"}
    assert [system for _, name, system in runs if name == MAKESPAN] == [*SYSTEMS]
    assert [system for _, _, system in runs_of(FULL, ["3 jobs"], ["plan"])] == ["plan"] * FULL.rounds


def test_times_are_compared_within_a_round() -> None:
    runs = [found("1 job", "plan", 1.0), found("3 jobs", "exchange", 1.1)]
    runs += [found("1 job", "plan", 2.0), found("3 jobs", "exchange", 2.0)]
    runs += [found(MAKESPAN, "no sharing", 1.0, 100.0), found(MAKESPAN, "exchange", 1.0, 40.0)]
    assert [sentence.split(": ")[1] for sentence in sentences(runs)] == ["1.05 (1.00 to 1.10)", "0.40 (0.40 to 0.40)"]
