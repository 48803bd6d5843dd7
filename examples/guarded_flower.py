"""Runs a PyTorch job of Flower in its simulation, behind the guard of model updates.

    pip install 'fedsynth[flower]' 'flwr[simulation]'
    python examples/guarded_flower.py

The job has the form of Flower's quickstart-pytorch. Its only change is `GuardedClientApp`. Each
client's budget suffices for one run of three rounds, so a second run is refused in its first round.
Afterwards, `fedsynth privacy verify guard` checks the report.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.nn import functional as F

from fedsynth import load_dataset
from fedsynth.deployment.flower.guard import GuardedClientApp

SETTINGS = """\
clip = 1.0
epsilon = 8.0
delta = 1e-5
rounds = 3

[nominal]
num-examples = 100
"""
CLIENTS, ROUNDS = 10, 3

app = GuardedClientApp()


def load(message: Message, context: Context) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Returns the received model and the records of the client."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train, _ = load_dataset("digits")
    number = int(context.node_config["partition-id"])
    return model, train.images[number::CLIENTS] / 255, train.labels[number::CLIENTS]


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@app.train()  # type: ignore[untyped-decorator]  # Flower is not type-checked
def train(message: Message, context: Context) -> Message:
    model, images, labels = load(message, context)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": loss.item(), "num-examples": len(labels)})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(content=RecordDict(content), reply_to=message)


@app.evaluate()  # type: ignore[untyped-decorator]
def evaluate(message: Message, context: Context) -> Message:
    model, images, labels = load(message, context)
    right = (model(images).argmax(dim=1) == labels).float().mean()
    metrics = MetricRecord({"eval_acc": float(right), "num-examples": len(labels)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    FedAvg().start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        num_rounds=ROUNDS,
        evaluate_fn=accuracy,
    )


def accuracy(number: int, arrays: ArrayRecord) -> Any:
    """Returns the accuracy of the server's model on public images."""
    model = network()
    model.load_state_dict(arrays.to_torch_state_dict())
    _, test = load_dataset("digits")
    right = (model(test.images / 255).argmax(dim=1) == test.labels).float().mean()
    return MetricRecord({"accuracy": float(right)})


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    folder = Path("guard").absolute()
    folder.mkdir(exist_ok=True)
    (folder / "guard.toml").write_text(SETTINGS)
    os.environ["FEDSYNTH_GUARD"] = str(folder)
    run_simulation(server, app, num_supernodes=CLIENTS)
