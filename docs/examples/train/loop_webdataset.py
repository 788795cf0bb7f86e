"""The shards of a WebDataset, shown as directories by -o archives=tar: python loop_webdataset.py /mnt/imagenet/train

Each member is a file, so the dataset is map-style: epochs are shuffled as a whole, and need no webdataset to be read.
"""

import logging
import sys

import torch
from images import Images, network
from torch.utils.data import DataLoader

import trainer_hook

logging.basicConfig(level=logging.INFO)


class Shards(Images):
    def __init__(self, root):
        # Of each sample its image, and the number in its member `cls`.
        self.samples = trainer_hook.webdataset_samples(root)
        self.classes = sorted({label for _, label in self.samples})


dataset = Shards(sys.argv[1])
loader = DataLoader(dataset, 8, shuffle=True, num_workers=2)
model = network(len(dataset.classes))
model(dataset[0][0][None])
print(planning := trainer_hook.plan(sys.argv[1], loader))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss:.3f}")
planning.close()
