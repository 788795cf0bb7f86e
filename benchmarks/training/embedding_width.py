"""What SpiderCache's scores lose when embeddings are projected to 64 numbers, and what the network's own width costs.

    .venv-dev/bin/python -m benchmarks.training.embedding_width --data DIR --json FILE      wants a GPU
    .venv-dev/bin/python -m benchmarks.training.embedding_width --quick                     under a minute, on a CPU

DIR holds train/CLASS/NAME and test/CLASS/NAME; without --data the images are noise around a colour for each class. A
ResNet-18 is trained with uniform sampling. After each epoch all training samples are embedded as the hook embeds them,
once at the network's own width and once for each smaller width, and scored twice, the second time with the radius that
the first time found. The table compares the scores of the second time with those of the network's own width:

    rank correlation    Spearman's, over all samples
    top fifth           the share of the fifth with the highest scores that is in the fifth of both
    draws moved         the share of an epoch's draws that would fall on other samples (total variation)

"the epoch before" compares the scores of the network's own width with themselves, one epoch earlier: so much they move
while the network learns. Rows per second are those of the scorer alone, on the CPU, in batches of 128.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.common.command import add_data, command_line
from benchmarks.common.extent import Extent, add_extent, extent_of
from benchmarks.common.interruption import exit_status
from benchmarks.common.results import machine, plain_table, save, spread, wide_console
from benchmarks.training.full_size import generated, pool_of
from benchmarks.training.in_process import Pool
from benchmarks.training.resnet import QUICK_WIDTH, USUAL_WIDTH, recipe_of
from benchmarks.training.training import EVALUATED, IMAGES, Recipe, Steps, find_data
from spiderfs.scorer.index import BLOCK_ROWS
from spiderfs.scorer.scorer import PAPERS_NEIGHBOURS, Scorer
from spiderfs.scorer.scoring import ScorerOptions
from trainer_hook.model.capture import projection

FULL = Extent(epochs=6, training=20_000, held_out=1_000, seeds=1)
QUICK = Extent(epochs=2, training=600, held_out=200, seeds=1)
WIDTHS = (128, 64, 16)
EPOCH_BEFORE = "the epoch before"
TABLE_WIDTH = 110

Scores = NDArray[np.float32]


@dataclass(frozen=True)
class Row:
    seed: int
    epoch: int
    width: int | str
    """How many numbers an embedding has; EPOCH_BEFORE compares epochs in place of widths."""
    rank_correlation: float
    top_fifth: float
    draws_moved: float
    rows_per_s: float | None
    """None where nothing was scored for this row."""


def trained(model: nn.Sequential, steps: Steps, pool: Pool, recipe: Recipe, epoch: int) -> None:
    """Train one epoch with uniform sampling."""
    model.train()
    order = torch.randperm(len(pool.labels))
    batches = torch.split(order, recipe.batch)
    for number, batch in enumerate(batches):
        batch = batch.to(pool.images.device)
        with recipe.precision():
            loss = nn.functional.cross_entropy(model(recipe.augmented(pool.images[batch])), pool.labels[batch])
        steps.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        steps.optimizer.step()
        steps.taken(epoch, number + 1, len(batches))


def embeddings(model: nn.Sequential, pool: Pool, recipe: Recipe) -> Tensor:
    """(samples, width) inputs of the classifier for all training images, each of length 1, in half precision."""
    model.eval()
    with torch.no_grad(), recipe.precision():
        parts = [model[:-1](recipe.prepared(part)) for part in torch.split(pool.images, EVALUATED)]
    return nn.functional.normalize(torch.cat(parts).float(), dim=1).half()


def narrowed(full: Tensor, width: int) -> NDArray[np.float16]:
    """The embeddings as the hook sends them with this `embed_dim`."""
    own = full.shape[1]
    if own > width:
        full = (full.float() @ projection(own, width).to(full.device)).half()
    return full.cpu().numpy()


def scored(sent: NDArray[np.float16], labels: list[int], seed: int) -> tuple[Scores, float]:
    """Scores of all samples by equation 4, and how many rows the scorer took in a second."""
    scorer = Scorer(labels, sent.shape[1], ScorerOptions(PAPERS_NEIGHBOURS))
    rng = np.random.default_rng(seed)
    for _ in range(2):
        scorer.new_epoch()
        order = rng.permutation(len(labels))
        began = time.monotonic()
        for start in range(0, len(order), BLOCK_ROWS):
            ids = order[start : start + BLOCK_ROWS]
            scorer.batch(ids, sent[ids])
        seconds = time.monotonic() - began
    return scorer.scores.copy(), len(labels) / seconds


def compared(one: Scores, other: Scores) -> dict[str, float]:
    fifth = len(one) // 5
    top = [set(np.argsort(-scores, kind="stable")[:fifth].tolist()) for scores in (one, other)]
    chances = [scores / scores.sum(dtype=np.float64) for scores in (one, other)]
    return {
        "rank_correlation": float(spearmanr(one, other).statistic),
        "top_fifth": len(top[0] & top[1]) / fifth,
        "draws_moved": float(np.abs(chances[0] - chances[1]).sum() / 2),
    }


def measure(arguments: argparse.Namespace, console: Console) -> None:
    extent, device = arguments.extent, arguments.device
    pool = generated(extent, device) if arguments.data is None else pool_of(find_data(arguments.data, extent), device)
    labels, found = pool.labels.tolist(), []
    recipe = recipe_of(QUICK_WIDTH if arguments.quick else USUAL_WIDTH, device)
    for seed in range(1, extent.seeds + 1):
        torch.manual_seed(seed)
        model = recipe.network(pool.held_out.classes)
        steps = Steps(model, extent.epochs, len(labels), recipe.batch, recipe.optimizer)
        before: Scores | None = None
        for epoch in range(extent.epochs):
            trained(model, steps, pool, recipe, epoch)
            full = embeddings(model, pool, recipe)
            own, speed = scored(narrowed(full, full.shape[1]), labels, seed)
            found.append(Row(seed, epoch + 1, full.shape[1], **compared(own, own), rows_per_s=speed))
            if before is not None:
                found.append(Row(seed, epoch + 1, EPOCH_BEFORE, **compared(before, own), rows_per_s=None))
            for width in WIDTHS:
                if width < full.shape[1]:
                    scores, speed = scored(narrowed(full, width), labels, seed)
                    found.append(Row(seed, epoch + 1, width, **compared(own, scores), rows_per_s=speed))
            before = own
            console.print(f"seed {seed}, epoch {epoch + 1} of {extent.epochs}", style="dim", highlight=False)
    save(arguments.json, {"machine": machine(), "extent": asdict(extent), "rows": [asdict(row) for row in found]})
    show(found, console)


def show(found: list[Row], console: Console) -> None:
    table = plain_table(
        "Scores at a smaller width beside those at the network's own; mean ± deviation over epochs",
        *("width", "rank correlation", "top fifth %", "draws moved %", "rows/s", "bytes a row"),
    )
    for width, group in itertools.groupby(sorted(found, key=lambda row: str(row.width)), lambda row: row.width):
        rows = list(group)
        speeds = [row.rows_per_s for row in rows if row.rows_per_s is not None]
        cells: list[Any] = [
            spread([row.rank_correlation for row in rows], ".3f"),
            spread([row.top_fifth for row in rows], ".0f", 100),
            spread([row.draws_moved for row in rows], ".1f", 100),
            spread(speeds, ",.0f") if speeds else "",
            str(2 * width) if isinstance(width, int) else "",
        ]
        table.add_row(str(width), *cells)
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = command_line(__doc__)
    add_data(parser, IMAGES)
    add_extent(parser, FULL, QUICK)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        metavar="NAME",
        help="where images and network are (default here: %(default)s)",
    )
    arguments = parser.parse_args()
    arguments.extent = extent_of(parser, arguments, FULL, QUICK)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    console = wide_console(TABLE_WIDTH)
    return exit_status("embedding_width", lambda: measure(arguments, console), "interrupted", (OSError, RuntimeError))


if __name__ == "__main__":
    sys.exit(main())
