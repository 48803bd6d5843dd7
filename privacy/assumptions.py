"""For whom a report's guarantee holds, against whom, and on which assumptions: its sentences."""

from __future__ import annotations

from fedsynth.privacy.releases import RECORD, USER
from fedsynth.privacy.report_inputs import ReportContext
from fedsynth.privacy.report_schema import OF_EARLIER, NotCovered, TrustModel, Unit

NOT_COVERED = NotCovered(
    tuning_and_selection="not covered: choosing settings, methods or rounds by results on private "
    "data costs privacy that this report does not count",
    public_data_and_pretraining="not covered: what is declared public, pretrained weights "
    "included, gets no protection here",
    timing="not covered: how long a client takes can depend on its data",
    drop_outs="not covered: whether a client answers can depend on its data",
    simulation="losses, accuracies per client, partitions and true counts that a simulation shows "
    "are exact functions of the data and stand outside any guarantee",
)
_HELD_BY_ONE = {
    RECORD: "the partition is fixed, and each example is held by one client",
    USER: "the partition is fixed, all examples of a user are held by one client, and the data say "
    "rightly whose each is",
}


def sums_alone(context: ReportContext, shares: int) -> list[str]:
    """The warning where noise is shared, in this run or in one whose releases are counted too."""
    if shares == 1:
        return []
    if context.fewest:
        return [
            "The noise of some releases is that of several clients together (see the ledger): "
            "epsilon holds against those who see the sums over clients, which is all that this "
            "run's server was sent, and not against a server with more clients on its side than "
            "the trust model has, who know their noise and the masks of others (see the "
            "assumptions)."
        ]
    return [
        "The noise of some releases is that of several clients together (see the ledger): epsilon "
        "holds only against those who see of these releases the sums over all clients, and no "
        "client's own upload. "
        f"A single upload has as little as 1/√{shares} of the noise that is charged: whoever sees "
        "one, such as a server without a secure aggregation, learns more than epsilon says."
    ]


def assumptions(context: ReportContext, shares: int) -> list[str]:
    """What a guarantee rests on; `shares` is the largest H of all releases that are counted."""
    found = [
        "the code that ran is this code, and it drew the noise and the sampling masks that the "
        "ledger lists",
        "every item under 'public' was fixed before the private data were read",
        _HELD_BY_ONE[context.unit],
        "all else that leaves a client is computed from the accounted releases and public items "
        "alone",
        "Gaussian noise in floating point stands for the exact one; attacks on its low-order bits "
        "are not ruled out",
    ]
    if context.own_code:
        found.append(
            f"{' and '.join(context.own_code)}, which the user gave, makes of each example what "
            "depends on that example only, and nothing in it comes from private data: a trial on "
            "random public images found nothing else, which is no proof"
        )
    if shares > 1 and context.fewest:
        found.append(
            f"of this run's sums, which were made under masks of at least {context.fewest} "
            "clients: their server has passed on the clients' keys as they were and told all of "
            f"them the same, at most {context.fewest - context.shares} of a sum's clients are on "
            f"its side, and at least {context.shares} have added their noise and tell it to "
            "nobody; of earlier runs on the same ledgers what their reports assume"
        )
    elif shares > 1:
        found.append(
            "a secure aggregation shows of every release whose noise is that of several clients "
            "together nothing but the sum over all clients, and as many clients as the ledger says "
            f"(up to {shares}) add their noise to it and tell it to nobody"
        )
    if context.max_records is not None:
        found.append(
            f"all clients together hold at most {context.max_records} records, the declared bound"
        )
    if context.fresh_ledger:
        because = f", since {context.no_ledger}" if context.no_ledger else ""
        found.append(
            f"no ledger was kept over runs (privacy.ledger){because}: this run began with an empty "
            "ledger, and earlier and later runs on the same data are not counted"
        )
    else:
        found.append(
            "the ledger files hold every earlier release from the same data: what stands in them "
            "is counted, and a file that was empty when this run began counts from then on"
        )
    return found


def protected_unit(private: bool, unit: str, user_records: int | None) -> Unit:
    """Who is protected, and who is not."""
    if not private:
        return Unit(
            one="nobody",
            several="examples",
            protects="nothing that could be proved",
            does_not_protect="examples, persons or clients",
        )
    if unit == USER:
        bound = f"at most {user_records}, by a public choice" if user_records else "any number"
        return Unit(
            one="one user of one client",
            several="users",
            protects="ONE USER OF ONE CLIENT (all examples of theirs there together)",
            does_not_protect="a person with examples at several clients, or under several user "
            "ids; a client as a whole",
            records_per_user=f"{bound}; a user contributes the mean of their examples' vectors, "
            "clipped as one",
            group_privacy="j users together have the weaker guarantee of a group of j, which grows "
            "at least about j-fold; see 'groups' for what could be computed",
        )
    return Unit(
        one="one example of one client",
        several="examples",
        protects="ONE EXAMPLE OF ONE CLIENT (example level only)",
        does_not_protect="a person with several examples, or with examples at several clients; a "
        "client as a whole",
        records_per_user="no bound was declared or enforced (privacy.unit=user protects all "
        "examples of a person)",
        group_privacy="a person with j examples has the weaker guarantee of a group of j, which "
        "grows at least about j-fold; see 'groups' for what could be computed",
    )


def _earlier(shares: int) -> str:
    """Where this run's noise is each client's own, and that of earlier ones was shared."""
    return (
        f"{OF_EARLIER}: releases of earlier runs on the same ledgers are counted, of which each "
        f"client added as little as 1/√{shares} of the noise; for these the reports of those runs "
        "say whom they hold against"
    )


def _aggregated(model: TrustModel, context: ReportContext) -> TrustModel:
    """The model where noise is shared: it holds against who sees sums alone."""
    shares = context.shares
    if context.fewest:
        return model.model_copy(update=_executed(context))
    return model.model_copy(
        update={
            "trusted": "each client trusts its own machine and this software, a secure "
            f"aggregation, and that of a round's clients at least {shares}, it among them, add "
            "their noise and tell it to nobody",
            "adversary": "the server, the other clients but for those, and everybody else; they "
            "know all settings and code, every other example, and see the sum over all clients of "
            "every round, and no client's own upload",
            "secure_aggregation": f"assumed, not executed: each client adds 1/√{shares} of the "
            "noise that is charged, so whoever sees a single upload, as this simulation does, sees "
            "one with less noise",
        }
    )


def _executed(context: ReportContext) -> dict[str, str]:
    """What the model says where the sums were made under masks."""
    return {
        "trusted": "each client trusts its own machine and this software, that the server passes "
        "on the clients' keys as they are and tells all of them the same, and that of a sum's "
        f"clients at least {context.shares}, it among them, add their noise and tell it to nobody",
        "adversary": f"the server, at most {context.fewest - context.shares} of a sum's clients, "
        "and everybody else; they know all settings and code, every other example, and see the sum "
        "over the clients of every round, and of a client's own upload masked words",
        "secure_aggregation": "aggregation executed: the server was sent masked vectors (Bonawitz "
        "et al. 2017: X25519, ChaCha20, shares of Shamir's), and has made sums of at least "
        f"{context.fewest} clients of them; each client adds 1/√{context.shares} of the noise that "
        "is charged, and rounds after it to a grid that is the same for all",
    }


def trust_model(private: bool, context: ReportContext, shares: int) -> TrustModel:
    """Whom the guarantee trusts, and against whom it holds.

    Args:
        private: there is a guarantee.
        context: the run's.
        shares: the largest H of all releases that are counted, earlier runs' too; 1: every noise is
            one client's own.
    """
    model = TrustModel(
        trusted="each client trusts its own machine and this software, and nobody else",
        adversary="the server, the other clients and everybody else; they know all settings and "
        "code, every other example, and see every upload of every round",
        secure_aggregation="none",
        client_sampling="no amplification is claimed",
    )
    if not private:
        return model
    if context.shares > 1:
        model = _aggregated(model, context)
    elif shares > 1:
        model = model.model_copy(update={"secure_aggregation": _earlier(shares)})
    one = "user" if context.unit == USER else "example"
    whose = f"epsilon is the worst client's, for one {one} held by one client"
    return model.model_copy(update={"federation": whose})
