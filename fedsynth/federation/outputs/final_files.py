"""The files that a run ends with: report, model, images and what the server measured; of a
simulation and of a run over nodes alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedsynth.core.context import RoundContext
from fedsynth.core.messages import Message
from fedsynth.core.method import Method
from fedsynth.core.state import ServerState
from fedsynth.federation.outputs.report_facts import handed_over
from fedsynth.federation.outputs.run_folder import SERVER, RunFolder
from fedsynth.privacy.report import write_report
from fedsynth.synthesizer.condensation.sets import synthetic_sets


@dataclass(frozen=True)
class FinalFiles:
    """Of a run.

    Args:
        method: the run's.
        state: the server's last.
        context: of a round of the run.
        parameters: the final model's.
        uploads: of the last round that counted, by client.
        report: the privacy report; None without privacy.
    """

    method: Method
    state: ServerState
    context: RoundContext
    parameters: Mapping[str, Tensor]
    uploads: Mapping[int, Message]
    report: dict[str, Any] | None

    def write(
        self, folder: RunFolder, missing: Callable[[str, Exception], None]
    ) -> dict[str, Any] | None:
        """What was promised first, and pictures last: none of them may cost a result.

        The report is written again once the files are there whose hashes it has; that one is
        returned.

        Args:
            folder: the run's.
            missing: receives the name of a picture that cannot be made, and why.

        Raises:
            OutputError, PrivacyError: anything else cannot be written.
        """
        report = self.report
        if report is not None:
            write_report(report, folder.path)
        folder.write_model(self.parameters)
        sets, soft = self._sets()
        if sets:
            folder.write_synthetic(sets, self.context.spec, soft)
        artefacts = self.method.artefacts(self.state)
        folder.write_artefacts(artefacts)
        if report is not None:
            report = {**report, "files": handed_over(folder.path)}
            write_report(report, folder.path)
        try:
            if sets:
                folder.draw_synthetic(sets, self.context.spec)
            folder.draw_artefacts(artefacts, self.context.spec.class_names)
        except Exception as error:
            missing("picture", error)
        return report

    def _sets(self) -> tuple[list[tuple[int, Tensor, Tensor]], list[Tensor | None]]:
        """The last uploads' images and the server's own: client, images, labels; and soft
        labels."""
        sent = synthetic_sets(self.uploads)
        sets = [(client, one.images, one.labels) for client, one in sent.items()]
        soft = [one.soft_labels() for one in sent.values()]
        made = self.method.synthetic(self.state, self.context)
        if made is not None:
            sets.append((SERVER, *made))
            soft.append(self.method.synthetic_soft_labels(self.state, self.context))
        return sets, soft
