"""torchdata, whose loader can resume in mid-epoch: python loop_torchdata.py /mnt/imagenet/train"""

import logging
import sys

import torch
from images import Images, network
from torchdata.stateful_dataloader import StatefulDataLoader

import trainer_hook

logging.basicConfig(level=logging.INFO)
dataset = Images(sys.argv[1])
loader = StatefulDataLoader(dataset, 8, shuffle=True, num_workers=2)
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
