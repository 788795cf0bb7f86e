"""The served samples of several trainers, against a plain list of reads."""

from __future__ import annotations

import tracemalloc

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spiderfs.core.batches import ServedSamples


def test_first_served_is_first_to_arrive() -> None:
    served_samples = ServedSamples()
    for served in (70, 7, 71):
        served_samples.record_read("one", 7, served)
    served_samples.record_read("two", 7, 99)
    assert served_samples.arrived("one", [7, 5, 7]) == [70, 5, 7]
    assert served_samples.arrived("two", [7, 7]) == [99, 7]
    assert served_samples.arrived("one", [7]) == [71]
    assert [served_samples.arrived(trainer, [7]) for trainer in ("one", "two", "other")] == [[7]] * 3, "nothing is left"


def test_the_oldest_reads_are_forgotten_first() -> None:
    served_samples = ServedSamples(max_on_the_way=2)
    for served in (70, 71, 72):
        served_samples.record_read("one", 7, served)
    served_samples.record_read("one", 8, 80)
    assert served_samples.forgotten == 2
    assert served_samples.arrived("one", [7, 8, 7]) == [72, 80, 7]


TRAINERS = st.sampled_from(["one", "two"])
SAMPLES = st.integers(0, 5)
ROOM = 7


class ServedSamplesAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.served_samples = ServedSamples(ROOM)
        self.model: dict[str, list[tuple[int, int]]] = {"one": [], "two": []}
        self.number = 100
        self.forgotten = 0

    @rule(trainer=TRAINERS, wanted=SAMPLES)
    def served(self, trainer: str, wanted: int) -> None:
        # Every read is served by another one: so that each is seen to come back exactly once.
        self.number += 1
        self.served_samples.record_read(trainer, wanted, self.number)
        self.forgotten += len(self.model[trainer]) == ROOM
        self.model[trainer] = [*self.model[trainer], (wanted, self.number)][-ROOM:]

    @rule(trainer=TRAINERS, batch=st.lists(SAMPLES, max_size=4))
    def arrived(self, trainer: str, batch: list[int]) -> None:
        expected = []
        for wanted in batch:
            first = next((read for read in self.model[trainer] if read[0] == wanted), None)
            if first is not None:
                self.model[trainer].remove(first)
            expected.append(first[1] if first else wanted)
        assert self.served_samples.arrived(trainer, batch) == expected

    @rule(trainer=TRAINERS)
    def forget(self, trainer: str) -> None:
        self.served_samples.forget(trainer)
        self.model[trainer] = []

    @invariant()
    def counts_agree(self) -> None:
        assert self.served_samples.forgotten == self.forgotten


TestServedSamplesAgainstModel = ServedSamplesAgainstModel.TestCase
TestServedSamplesAgainstModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


def test_memory_does_not_grow_with_reads_that_have_arrived() -> None:
    served_samples = ServedSamples(max_on_the_way=2)
    served_samples.record_read("one", "stays", "another")
    tracemalloc.start()
    try:
        for number in range(10_000):
            served_samples.record_read("one", number, number)
            served_samples.arrived("one", [number])
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 100_000
    assert served_samples.forgotten == 0, "what has arrived does not wait"
    assert served_samples.arrived("one", ["stays"]) == ["another"]
