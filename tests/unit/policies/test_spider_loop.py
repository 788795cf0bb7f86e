"""Scorer, served samples, policy and engine together, driven by a training loop with a loader that reads ahead."""

from __future__ import annotations

from collections import deque

import numpy as np

from spiderfs.core.batches import ServedSamples
from spiderfs.core.engine import Engine
from spiderfs.core.feed import Elastic
from spiderfs.core.policy import Hub, Key
from spiderfs.policies.baselines import LRU
from spiderfs.policies.spider import HOMOPHILY, Spider
from spiderfs.scorer.scorer import Scorer
from spiderfs.scorer.scoring import ScorerOptions

SAMPLES, CACHED, BATCH, AHEAD, EPOCHS = 1000, 200, 25, 4, 5
FIRST_INODE = 10_000


class Training:
    """A training that reads batches ahead, and tells the scorer which samples it really got."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.labels = self.rng.integers(0, 5, SAMPLES)
        centres = self.rng.normal(size=(5, 16))
        # One sample in ten lies among another class: these are the important ones.
        self.astray = self.rng.random(SAMPLES) < 0.1
        lies_with = np.where(self.astray, (self.labels + 1) % 5, self.labels)
        self.embeddings = centres[lies_with] + 0.5 * self.rng.normal(size=(SAMPLES, 16))
        self.policy = Spider()
        self.engine = Engine(self.policy, CACHED)
        self.lru = Engine(LRU(), CACHED)
        self.scorer = Scorer(self.labels, 16, ScorerOptions(neighbours=50))
        self.served_samples, self.elastic = ServedSamples(), Elastic()
        self.on_the_way: deque[tuple[list[int], list[int]]] = deque()
        self.spider_hits = self.lru_hits = self.redirects = 0

    def read(self, sample: int) -> int:
        """Read a sample; returns the sample whose bytes were served."""
        wanted = FIRST_INODE + sample
        self.lru_hits += wanted in self.lru.members
        self.lru.opened(wanted, 1)
        given: Key = wanted
        if wanted in self.engine.members:
            self.spider_hits += 1
        elif (hub := self.policy.substitute_for("train", wanted)) is not None:
            self.policy.substituted("train", hub, wanted)
            self.redirects += 1
            given = hub
        self.engine.opened(given, 1)
        self.served_samples.record_read("trainer", wanted, given)
        return int(str(given)) - FIRST_INODE

    def train(self, wanted: list[int], given: list[int]) -> None:
        arrived = self.served_samples.arrived("trainer", [FIRST_INODE + sample for sample in wanted])
        served = [int(str(key)) - FIRST_INODE for key in arrived]
        assert served == given
        assert (self.labels[served] == self.labels[wanted]).all()
        moved = self.embeddings[served] + 0.05 * self.rng.normal(size=(len(served), 16))
        scores = self.scorer.batch(served, moved.astype(np.float16))
        for sample, score in zip(scores.ids.tolist(), scores.scores.tolist(), strict=True):
            self.policy.scored(FIRST_INODE + sample, score)
        found = scores.hub(skip=lambda sample: self.policy.section_for(FIRST_INODE + sample) == HOMOPHILY)
        if found is not None:
            neighbours = (found.neighbours + FIRST_INODE).tolist()
            self.policy.hub_found(Hub(FIRST_INODE + found.id, "train", neighbours, found.distances.tolist()))
            self.engine.place(FIRST_INODE + found.id, 1)

    def epoch(self, progress: float) -> None:
        self.spider_hits = self.lru_hits = self.redirects = 0
        self.scorer.new_epoch()
        self.policy.new_epoch("train")
        self.served_samples.forget("trainer")
        self.elastic.observe_sigma(self.scorer.sigma)
        self.policy.set_ratio(self.elastic.ratio(progress))
        self.engine.settle()
        weights = self.scorer.scores / self.scorer.scores.sum(dtype=np.float64)
        for wanted in self.rng.choice(SAMPLES, (SAMPLES // BATCH, BATCH), p=weights).tolist():
            self.on_the_way.append((wanted, [self.read(sample) for sample in wanted]))
            if len(self.on_the_way) > AHEAD:
                self.train(*self.on_the_way.popleft())
        while self.on_the_way:
            self.train(*self.on_the_way.popleft())


def test_a_training_loop() -> None:
    training = Training()
    for epoch in range(EPOCHS):
        training.epoch(epoch / EPOCHS)
    # The samples among another class have the highest scores, are drawn most often, and fill the cache.
    scores, astray = training.scorer.scores, training.astray
    assert scores[astray].mean() > 4 * scores[~astray].mean()
    members = [key for key, member in training.engine.members.items() if member.section != HOMOPHILY]
    assert np.mean([astray[int(str(key)) - FIRST_INODE] for key in members]) > 0.4
    assert training.spider_hits > training.lru_hits
    assert training.spider_hits + training.redirects > 1.3 * training.lru_hits
    assert 0 < training.redirects <= 8 * training.engine.section_bytes[HOMOPHILY] + 8 * SAMPLES // BATCH
    assert training.served_samples.on_the_way("trainer") == 0
