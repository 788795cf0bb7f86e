"""transformers, whose Trainer makes its loader itself: python loop_transformers.py /mnt/imagenet/train"""

import logging
import sys

import torch
import transformers
from images import Images, network

import trainer_hook

logging.basicConfig(level=logging.INFO)
dataset = Images(sys.argv[1])


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = network(len(dataset.classes))
        self.model(dataset[0][0][None])

    def forward(self, images, labels):
        scores = self.model(images)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


def collated(samples):
    images, labels = zip(*samples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


arguments = transformers.TrainingArguments(
    num_train_epochs=2, per_device_train_batch_size=8, dataloader_num_workers=2, save_strategy="no", report_to="none"
)
# It attaches a hook, which also plans.
callback = trainer_hook.hugging_face_callback(sys.argv[1])
trainer = transformers.Trainer(
    Classifier(), arguments, train_dataset=dataset, data_collator=collated, callbacks=[callback]
)
print(f"epoch {trainer.train().metrics['epoch']:.0f}")
