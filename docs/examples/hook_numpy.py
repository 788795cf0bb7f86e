"""A training run in plain NumPy that publishes to spiderfs what it learns: no torch, one socket, the protocol's
messages.

    python hook_numpy.py /mnt/data

The directory holds one folder a class, with one .npy file a sample, all of one shape. The model is softmax regression;
a sample's embedding is the sample itself, made as short as the protocol asks for by a fixed random projection.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np

from spiderfs.protocol import (
    Batch,
    Decoder,
    EpochEnd,
    Goodbye,
    Hello,
    Limits,
    Message,
    Ok,
    Plan,
    Progress,
    Samples,
    Scores,
    ScoresRequest,
    encode,
)

EPOCHS = 3
BATCH = 16
RATE = 0.5


class Daemon:
    def __init__(self, mount: Path) -> None:
        path = os.fsdecode((mount / ".spiderfs" / "hook").read_bytes().rstrip(b"\n"))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._decoder = Decoder()

    def send(self, message: Message) -> None:
        self._socket.sendall(encode(message))

    def receive(self, kind: type[Any]) -> Any:
        """The next answer of this kind; others are shown, as they say what could not be used."""
        while True:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionError("the daemon has gone")
            for answer in self._decoder.feed(data):
                if isinstance(answer, kind):
                    return answer
                print(answer)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def main(mount: Path) -> None:
    rng = np.random.default_rng(7)
    files = sorted(mount.glob("*/*.npy"))
    classes = sorted({file.parent.name for file in files})
    labels = np.array([classes.index(file.parent.name) for file in files], np.int32)
    width = np.load(files[0]).size
    shorten = rng.normal(size=(width, min(width, Limits().dimension)))

    daemon = Daemon(mount)
    daemon.send(Hello("numpy", job=uuid.uuid4().hex, epoch=0, epochs=EPOCHS))
    daemon.receive(Ok)
    paths = b"".join(os.fsencode(file.relative_to(mount)) + b"\0" for file in files)
    daemon.send(Samples("train", "train", len(files), 0, labels, np.frombuffer(paths, np.uint8)))
    daemon.receive(Ok)

    model = np.zeros((width, len(classes)))
    for epoch in range(EPOCHS):
        daemon.send(ScoresRequest("train", epoch))
        scores = daemon.receive(Scores).scores.astype(np.float64)
        chances = scores / scores.sum() if scores.sum() > 0 else np.full(len(files), 1 / len(files))
        order = rng.choice(len(files), len(files), p=chances).astype(np.uint32)
        daemon.send(Plan("train", epoch, 0, True, order))
        right = 0
        for step, begin in enumerate(range(0, len(order), BATCH)):
            indices = order[begin : begin + BATCH]
            # What is read next is in hand, and the batches before it were taken.
            daemon.send(Progress("train", epoch, begin + len(indices), begin))
            rows = np.stack([np.load(files[index]).ravel() for index in indices])
            shares = softmax(rows @ model)
            picked = shares[np.arange(len(indices)), labels[indices]]
            right += int((shares.argmax(axis=1) == labels[indices]).sum())
            model -= RATE * rows.T @ (shares - np.eye(len(classes))[labels[indices]]) / len(indices)
            embeddings = rows @ shorten
            embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
            losses = np.minimum(-np.log(picked + 1e-12), np.finfo(np.float16).max)
            daemon.send(Batch("train", epoch, step, indices, embeddings.astype(np.float16), losses.astype(np.float16)))
        accuracy = right / len(order)
        print(f"epoch {epoch + 1}: accuracy {accuracy:.2f}")
        daemon.send(EpochEnd(epoch, accuracy))
    daemon.send(Goodbye())
    daemon.receive(Ok)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
