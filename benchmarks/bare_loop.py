"""The baseline of the first part of bench_ddp.py: a hand-written training loop without anything distributed.

    python bare_loop.py EPOCHS STEPS_PER_EPOCH BATCH_SIZE

trains the model of train_ddp.py on its data and prints the samples per second of each epoch as a JSON list.
"""

import json
import sys
import time
from itertools import islice

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from shared import datasets, models


def main(epochs: int, steps_per_epoch: int, batch_size: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    loader = DataLoader(datasets.digits().train, batch_size, shuffle=True, pin_memory=device.type == "cuda")
    model = models.resnet18().to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rates = []
    for _ in range(epochs):
        samples = 0
        started = time.perf_counter()
        for images, labels in islice(loader, steps_per_epoch):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(labels)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(samples / (time.perf_counter() - started))
    print(json.dumps(rates))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
