"""Computes clients' steps of a simulated run at a rank other than 0."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsynth.data.images import ImageData
from fedsynth.federation import ranks
from fedsynth.federation.client_runtime import ClientData, ClientRuntime
from fedsynth.federation.context import choose_speed, public_context
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.links import ALIVE, Links
from fedsynth.federation.protocol import Observer
from fedsynth.federation.run_data import Clients, RunData, divided, new_ledgers
from fedsynth.privacy.ledger import Ledger
from fedsynth.results.active_run import ActiveRun
from fedsynth.results.checkpoint import run_identity, without_place
from fedsynth.results.run_record import RunResult


class SignsOfLife(Observer):
    """Shows rank 0 that this rank runs while it encodes images.

    Args:
        links: the connection to rank 0.
    """

    def __init__(self, links: Links) -> None:
        self._links = links

    def step(self, round: int, stage: str, completed: int, total: int) -> None:
        self._links.send(0, ALIVE)


class Following(ActiveRun):
    """One simulated run at a rank other than 0.

    If all clients take part in each round, the rank has only the records of its own clients.

    Args:
        loaded: the data of the run, on the CPU.
        clients: the clients.
        device: the device of this rank.
        links: the connection to rank 0.
    """

    backend: InProcess

    def __init__(
        self, loaded: RunData, clients: Clients, device: torch.device, links: Links
    ) -> None:
        settings = choose_speed(loaded.settings, device)
        context = public_context(settings, loaded.train.spec, device)
        super().__init__(settings, context, Observer())
        self._links = links
        parts = list(map(torch.from_numpy, clients.parts))
        identity = run_identity(settings, loaded.train, loaded.test, parts)
        self._stated = ranks.statement(without_place(settings.to_mapping()), identity)
        train = loaded.train
        records, _ = divided(settings, parts, train)
        if settings.participation == 1:  # so that each rank has the same clients in all rounds
            train, records = self._part_of_rank(train, records)
        train = train.to(device)
        ledgers: Sequence[Ledger | None] = [None] * len(parts)
        if settings.privacy is not None:
            ledgers = new_ledgers(clients.ledger_names, None, settings)
        runtimes = []
        for number, ledger in enumerate(ledgers):
            data = ClientData(train, records[number], records[number][:0])
            runtimes.append(ClientRuntime(number, settings, self.context, data, ledger))
        self.backend = InProcess(runtimes)

    def _part_of_rank(
        self, train: ImageData, records: Sequence[Tensor]
    ) -> tuple[ImageData, list[Tensor]]:
        """Returns the records of this rank's clients, and each client's indices into them."""
        sizes = dict(enumerate(map(len, records)))
        assigned = ranks.owners(self.method, sizes, self.context, self._links.size)
        parts = []
        for number, part in enumerate(records):
            parts.append(part if assigned[number] == self._links.rank else part[:0])
        used = torch.cat(parts).unique()
        if not len(used):  # more ranks than clients
            return train.subset(np.arange(1)), parts
        return train.subset(used.numpy()), [torch.searchsorted(used, part) for part in parts]

    def run(self) -> RunResult:
        """Computes the steps that rank 0 requests, and returns the result of the run."""
        self._links.send(0, "hello", self._stated)
        frame = ranks.serve(self.backend, self._links)
        parameters = ranks.NamedTensors.from_bytes(frame.parts["model"]).tensors
        return RunResult(
            settings=self.settings,
            model=self.context.load(parameters),
            uploads={},
            folder=Path(frame.facts["summary"]["folder"])
            if "folder" in frame.facts["summary"]
            else None,
            **frame.facts,
        )


def send_result(links: Links, result: RunResult) -> None:
    """Sends the result of a run to all ranks, without uploads and artefacts."""
    names = ("accuracy", "metrics", "privacy", "summary", "deviations")
    facts = {name: getattr(result, name) for name in names}
    model = ranks.NamedTensors(result.model.state_dict()).to_bytes()
    links.send_all("end", facts, {"model": model})
