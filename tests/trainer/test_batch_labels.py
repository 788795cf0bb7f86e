"""What the labels of batches say: which batches are doubted, and when a doubt ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer_hook.model.attribution import MIXED, OTHERS, LabelCheck

SIZE = 1000
ROWS = 16

Batch = Callable[[Tensor], Any]


def doubts(batch_of: Batch, batches: int = 40, classes: int = 10) -> list[str | None]:
    """What is said of each batch; `batch_of` makes it of the labels that the list has."""
    torch.manual_seed(1)
    declared = torch.arange(SIZE) % classes
    labels = LabelCheck(declared.numpy().astype(np.int32))
    found = []
    for _ in range(batches):
        drawn = torch.randperm(SIZE)[:ROWS]
        found.append(labels.doubt(drawn.numpy().astype(np.uint32), batch_of(declared[drawn])))
    return found


def rows(labels: Tensor) -> Tensor:
    return torch.rand(len(labels), 3, 4, 4)


def some_replaced(labels: Tensor, share: float) -> Tensor:
    return torch.where(torch.rand(len(labels)) < share, torch.randint(10, labels.shape), labels)


@pytest.mark.parametrize(
    "batch_of",
    [
        lambda labels: (rows(labels), labels),
        lambda labels: {"pixels": rows(labels), "labels": labels[:, None].float()},
        lambda labels: (rows(labels), torch.eye(10)[labels] * 0.9 + 0.01),
        lambda labels: (rows(labels), torch.rand(ROWS), torch.randint(3, (ROWS, 7)), labels, torch.randint(2, (ROWS,))),
        lambda labels: (rows(labels), labels.bool().tolist()),
        lambda labels: (rows(labels), torch.randint(10**6, (ROWS,))),
        lambda labels: (rows(labels), labels, torch.randn(ROWS, 10).softmax(1)),
        lambda labels: rows(labels)[:-1],
    ],
)
def test_batches_with_the_labels_of_the_list_are_not_doubted(batch_of: Batch) -> None:
    assert doubts(batch_of) == [None] * 40


@pytest.mark.parametrize("renumber", [lambda label: label + 1, lambda label: 9 - label, lambda label: label // 3])
def test_a_training_may_number_the_classes_in_its_own_way(renumber: Callable[[Tensor], Tensor]) -> None:
    """Only batches with a class that was not seen before are left out, without a word."""
    found = doubts(lambda labels: (rows(labels), renumber(labels)))
    assert found[5:] == [None] * 35
    assert set(found) <= {None, ""}
    broken = doubts(lambda labels: (rows(labels), renumber(some_replaced(labels, 0.2))), 60)
    assert set(broken[10:]) == {OTHERS}


def test_a_second_target_of_two_classes_is_no_sign_of_mixing() -> None:
    found = doubts(lambda labels: (rows(labels), torch.rand(ROWS).round(), labels), classes=2)
    assert found[5:] == [None] * 35
    assert set(found) <= {None, ""}


@pytest.mark.parametrize(
    ("batch_of", "said"),
    [
        (lambda labels: (rows(labels), labels.sort().values), OTHERS),
        (lambda labels: (rows(labels), some_replaced(labels, 0.3)), OTHERS),
        (lambda labels: (rows(labels), torch.eye(10)[some_replaced(labels, 0.3)]), OTHERS),
        (lambda labels: (rows(labels), 0.6 * torch.eye(10)[labels] + 0.4 * torch.eye(10)[labels.roll(1)]), MIXED),
        (lambda labels: (rows(labels), labels, labels.roll(1)), MIXED),
    ],
)
def test_what_the_labels_show_to_be_other_samples_is_doubted(batch_of: Batch, said: str) -> None:
    found = doubts(batch_of)
    assert None not in found
    assert found[-1] == said


def test_the_rare_sample_in_the_place_of_another_stops_one_batch() -> None:
    """One soon after the beginning stops all, until a hundred batches have shown how rare it is."""
    seen = 0

    def batch_of(labels: Tensor) -> Any:
        nonlocal seen
        seen += 1
        if seen in (5, 300):
            labels = labels.clone()
            labels[3] = (labels[3] + 1) % 10
        return rows(labels), labels

    found = doubts(batch_of, 400)
    assert [number for number, doubt in enumerate(found, 1) if doubt] == [*range(5, 100), 300]
