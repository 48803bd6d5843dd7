"""What a data owner reads before its client joins a run: what is released, and what that costs."""

from __future__ import annotations

import torch

from fedsynth.core.messages import privacy_of_fields
from fedsynth.errors import FedsynthError
from fedsynth.federation.nodes.proposal import Proposal
from fedsynth.federation.outputs.privacy_words import headline, how_many
from fedsynth.federation.terms.context import public_context
from fedsynth.federation.terms.privacy_plan import PrivacyPlan
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import Ledger


def request_words(proposal: Proposal, number: int, ledger: Ledger | None) -> list[str]:
    """Lines for the owner.

    Args:
        proposal: the server's.
        number: the client's.
        ledger: as it stands; None: there is none yet.
    """
    run = proposal.settings
    method = run.method
    lines = [
        f"run {proposal.run} asks client {number} of {run.partition.clients}: {method.name}, "
        f"{how_many(run.rounds, 'round')}, data set {proposal.spec.name}, model {run.model.name}",
        f"  agreement {proposal.agreement}, by which its owner may approve exactly these settings",
    ]
    uploads = (
        [method.upload] if method.first_upload is None else [method.first_upload, method.upload]
    )
    for upload in uploads:
        declared = privacy_of_fields(upload)
        named = ", ".join(
            name if run.privacy is None else f"{name} ({kind})"
            for name, (kind, _) in declared.items()
        )
        how = ", masked, for sums of which the server sees no part" if method.sums_alone else ""
        lines.append(f"  it sends in each round{how}: {named}")
    return lines + _cost(proposal, ledger)


def _cost(proposal: Proposal, ledger: Ledger | None) -> list[str]:
    """What it costs by the client's own ledger; the server tells σ when all have joined."""
    run = proposal.settings
    if run.privacy is None:
        return [
            "  no differential privacy: what it sends is not protected, and no later run on these "
            "records can have an ε"
        ]
    held = ledger.releases if ledger is not None else ()
    own = History("this client", held)
    try:
        context = public_context(run, proposal.spec, torch.device("cpu"))
        plan = PrivacyPlan.make(run, context, [own] * run.partition.clients)
        return [f"  {line}" for line in headline(plan, simulated=False)]
    except (FedsynthError, PrivacyError) as error:
        return [f"  it cannot take part: {error}"]
