"""The part of a simulated run at a rank other than 0, which only computes clients' steps."""

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
from fedsynth.federation.protocol import Observer
from fedsynth.federation.run_data import Clients, RunData, divided, new_ledgers
from fedsynth.privacy.ledger import Ledger
from fedsynth.results.active_run import ActiveRun
from fedsynth.results.checkpoint import run_identity
from fedsynth.results.run_record import RunResult


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
        self, loaded: RunData, clients: Clients, device: torch.device, links: ranks.Links
    ) -> None:
        settings = choose_speed(loaded.settings, device)
        context = public_context(settings, loaded.train.spec, device)
        super().__init__(settings, context, Observer())
        self._links = links
        parts = list(map(torch.from_numpy, clients.parts))
        self._identity = run_identity(settings, loaded.train, loaded.test, parts)
        train = loaded.train
        records, _ = divided(settings, parts, train)
        if settings.participation == 1:  # so that each rank has the same clients in all rounds
            train, records = self._own_part(train, records)
        train = train.to(device)
        ledgers: Sequence[Ledger | None] = [None] * len(parts)
        if settings.privacy is not None:
            ledgers = new_ledgers(clients.ledger_names, None, settings)
        runtimes = []
        for number, ledger in enumerate(ledgers):
            data = ClientData(train, records[number], records[number][:0])
            runtimes.append(ClientRuntime(number, settings, self.context, data, ledger))
        self.backend = InProcess(runtimes)

    def _own_part(
        self, train: ImageData, records: Sequence[Tensor]
    ) -> tuple[ImageData, list[Tensor]]:
        """Returns the records of this rank's clients, and their positions for each client."""
        sizes = dict(enumerate(map(len, records)))
        assigned = ranks.owners(self.method, sizes, self.context, self._links.size)
        own = [
            part if assigned[k] == self._links.rank else part[:0] for k, part in enumerate(records)
        ]
        used = torch.cat(own).unique().numpy()
        if not len(used):  # more ranks than clients
            return train, own
        return train.subset(used), [
            torch.from_numpy(np.searchsorted(used, part.numpy())) for part in own
        ]

    def run(self, started: ranks.Frame | None) -> RunResult:
        """Computes the steps that rank 0 requests, and returns the result of the run."""
        stated = ranks.statement(self._identity)
        self._links.send(0, "hello", {"stated": stated})
        frame = ranks.serve(self.backend, self._links, started)
        parameters = ranks.NamedTensors.from_bytes(frame.parts["model"]).tensors
        facts = dict(frame.facts)
        folder = facts.pop("folder")
        return RunResult(
            settings=self.settings,
            model=self.context.load(parameters),
            uploads={},
            folder=None if folder is None else Path(folder),
            deviations=tuple(facts.pop("deviations")),
            **facts,
        )


def send_result(links: ranks.Links, result: RunResult) -> None:
    """Sends the result of a run to all ranks, without uploads and artefacts."""
    facts = {
        "accuracy": result.accuracy,
        "metrics": result.metrics,
        "privacy": result.privacy,
        "folder": None if result.folder is None else str(result.folder),
        "summary": result.summary,
        "deviations": result.deviations,
    }
    model = ranks.NamedTensors(result.model.state_dict()).to_bytes()
    for peer in links.peers:
        links.send(peer, "end", facts, {"model": model})
