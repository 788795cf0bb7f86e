"""Lightning: python loop_lightning.py /mnt/imagenet/train"""

import logging
import sys

import lightning
import torch
from images import Images, network
from torch.utils.data import DataLoader

import trainer_hook

logging.basicConfig(level=logging.INFO)
dataset = Images(sys.argv[1])


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = network(len(dataset.classes))
        self.model(dataset[0][0][None])

    def training_step(self, batch):
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch + 1}")


loader = DataLoader(dataset, 8, shuffle=True, num_workers=2)
model = Classifier()
print(planning := trainer_hook.plan(sys.argv[1], loader))
trainer = lightning.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(model, loader)
planning.close()
