"""Opacus, by its own training loop: python contend_opacus.py WORKLOAD CONTENDER

DP-SGD of `PrivacyEngine.make_private`: `opacus-hooks` keeps every example's gradient, `opacus-ghost`
clips by the norms alone (`grad_sample_mode="ghost"`). Neither can scale gradients before they are
clipped, as DP2 does.
"""

from __future__ import annotations

import sys

import numpy as np
import opacus
import torch
import turns
import workloads
from opacus.layers import DPMultiheadAttention
from torch import nn
from torch.nn import functional


class Factors(nn.Module):
    """The dot product of a user's factors and an item's."""

    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(workloads.USERS, workloads.FACTORS)
        self.items = nn.Embedding(workloads.ITEMS, workloads.FACTORS)

    def forward(self, users, items):
        return (self.users(users) * self.items(items)).sum(-1)


class Transformer(nn.Module):
    """One block over embedded tokens, pooled to a logit."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(workloads.TOKENS, 64)
        self.attention = DPMultiheadAttention(64, 4, batch_first=True)
        self.hidden = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.norms = nn.ModuleList(nn.LayerNorm(64, eps=1e-3) for _ in range(2))
        self.logit = nn.Linear(64, 1)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.norms[0](x + self.attention(x, x, x, need_weights=False)[0])
        return self.logit(self.norms[1](x + self.hidden(x)).mean(1))


class Loss:
    """The mean over a batch of each example's mean; Opacus asks for the examples by `reduction`."""

    reduction = "mean"

    def __init__(self, elements):
        self.elements = elements

    def __call__(self, outputs, labels):
        losses = self.elements(outputs, labels, reduction="none").reshape(len(labels), -1).mean(1)
        return losses.mean() if self.reduction == "mean" else losses


def build(workload):
    """The model of a workload, and the loss of its outputs and labels."""
    return {
        "linear": _linear,
        "factors": _factors,
        "cnn": _cnn,
        "transformer": _transformer,
        "dense": _dense,
    }[workload.model](workload)


def _linear(workload):
    one = workload.size == 1
    loss = functional.binary_cross_entropy_with_logits if one else functional.cross_entropy
    return nn.Linear(workloads.WORDS, workload.size), loss


def _factors(workload):
    return Factors(), functional.mse_loss


def _cnn(workload):
    model = nn.Sequential(
        *(nn.Flatten(), nn.Unflatten(1, (1, 28, 28))),
        *(nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)),
    )
    return model, functional.cross_entropy


def _transformer(workload):
    return Transformer(), functional.binary_cross_entropy_with_logits


def _dense(workload):
    return nn.Linear(workload.size, workload.size), functional.mse_loss


def private(model, loss, workload, rows, mode):
    """What `make_private` gives: model, optimizer and loss."""
    model, optimizer, *rest = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=loss,
        data_loader=torch.utils.data.DataLoader(range(rows), batch_size=workload.batch_size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    return model, optimizer, rest[0] if mode == "ghost" else loss


def tensors(x, y):
    """The data without a copy, but for labels that are classes."""
    features = [torch.from_numpy(part) for part in (x if isinstance(x, tuple) else (x,))]
    labels = torch.from_numpy(y)
    return features, labels if labels.is_floating_point() else labels.long()


def main(workload, name):
    torch.set_num_threads(2)
    x, y = tensors(*workload.data())
    elements_model, elements = build(workload)
    model, optimizer, loss = private(
        elements_model, Loss(elements), workload, len(y), name.removeprefix("opacus-")
    )
    rng = np.random.default_rng(1)

    def step(i):
        rows = torch.from_numpy(rng.integers(0, len(y), workload.batch_size))
        optimizer.zero_grad(set_to_none=True)
        value = loss(model(*(part[rows] for part in x)), y[rows])
        value.backward()
        optimizer.step()
        return value.item()

    turns.serve(step)


if __name__ == "__main__":
    main(workloads.WORKLOADS[sys.argv[1]], sys.argv[2])
