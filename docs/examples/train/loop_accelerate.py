"""accelerate, on any number of processes: accelerate launch loop_accelerate.py /mnt/imagenet/train"""

import logging
import sys

import torch
from accelerate import Accelerator
from images import Images, network
from torch.utils.data import DataLoader

import trainer_hook

logging.basicConfig(level=logging.INFO)
accelerator = Accelerator()
dataset = Images(sys.argv[1])
model = network(len(dataset.classes))
model(dataset[0][0][None])
loader = DataLoader(dataset, 8, shuffle=True, num_workers=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
# After `prepare`, and on each process.
print(planning := trainer_hook.plan(sys.argv[1], loader))
for epoch in range(2):
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss:.3f}")
planning.close()
