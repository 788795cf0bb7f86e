"""Hugging Face datasets, with the files of a mount: python loop_datasets.py /mnt/imagenet/train"""

import logging
import sys

import datasets
import torch
from images import network, tensor_of
from torch.utils.data import DataLoader

import trainer_hook

logging.basicConfig(level=logging.INFO)
dataset = datasets.load_dataset("imagefolder", data_dir=sys.argv[1], split="train")
# The dataset keeps paths, and reads an image when it is asked for.
undecoded = dataset.cast_column("image", datasets.Image(decode=False))
samples = [(row["image"]["path"], row["label"]) for row in undecoded]
shown = dataset.with_transform(
    lambda rows: {"image": [tensor_of(image) for image in rows["image"]], "label": rows["label"]}
)
loader = DataLoader(shown, 8, shuffle=True, num_workers=2)
model = network(dataset.features["label"].num_classes)
model(shown[0]["image"][None])
print(planning := trainer_hook.plan(sys.argv[1], loader, samples=samples))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss:.3f}")
planning.close()
