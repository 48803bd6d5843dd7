"""A data owner's node, which answers a server's messages.

The owner's policy and privacy budget limit what the node answers. A server proposes a run when it
asks the client to join. The node shows its owner the planned releases and their cost, and joins if
the owner allows the run. From then on the client uses the proposed settings, whatever the server
sends later, and charges its ledger before each release. Only public parameters, released values and
the entries of the ledger leave the node.

The owner's records come from a folder with one subfolder for each class. For trials, they can also
be a part of a published data set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from fedsynth.core.sums import sums_securely
from fedsynth.data.declaration import FolderSettings, read_declaration
from fedsynth.data.files import TRAIN
from fedsynth.data.folders import DECLARATION
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.own_data import read_as, read_private_records
from fedsynth.data.partition import partition
from fedsynth.data.partition_settings import EXPLICIT
from fedsynth.deployment import frames
from fedsynth.deployment.frames import SAME_VERSION, EndFacts, Frame, JoinFacts
from fedsynth.deployment.policy import ANY, describe_request
from fedsynth.deployment.proposal import RUN_NAME, Proposal, State, check_executable, read_state
from fedsynth.deployment.session import Place, Session
from fedsynth.errors import (
    DataError,
    FedsynthError,
    MessageError,
    RequestRefusedError,
    one_line,
)
from fedsynth.federation.context import public_context, resolve_device
from fedsynth.federation.position_leak_check import StepCheck, check_private_steps
from fedsynth.federation.protocol import REQUEST
from fedsynth.federation.run_data import Clients, data_set_id, protects_users
from fedsynth.files import locked_file
from fedsynth.privacy.ledger.folder import LedgerFolder
from fedsynth.privacy.releases import USER, Release
from fedsynth.privacy.report.build import write_report
from fedsynth.results.finished import is_unfinished
from fedsynth.results.later_reports import OWNER, owner_report

LOCK = ".answering"
# The text that a server receives for every error that its own message did not cause.
#
# The text of such an error may depend on the owner's files, records or machine, so only the owner
# sees it.
CANNOT = "this client cannot take part. Only the data owner sees the reason"


@dataclass(frozen=True)
class ClassFolders:
    """An owner's images, in a folder layout supported by `fedsynth.load_records`.

    The folder contains CLASS/files or a manifest. Sites in the manifest are ignored. The images are
    resized to the image size of the run. Folders may be missing for classes without images. Class
    names that a server sends are only compared with the names of the folders, and never used as
    paths.

    Args:
        folder: the owner's folder.
    """

    folder: Path

    def objections(self, proposal: Proposal, identified: bool) -> list[str]:
        """Returns reasons to reject a run whose classes or image size the owner has not declared.

        If a server could choose classes and sizes freely, it would learn which folders and images
        exist, because only some clients would join.

        Args:
            proposal: the server's proposal.
            identified: whether the owner's policy states the classes and the size of the images.
        """
        file = self.folder / DECLARATION
        if file.is_file() and (declared := read_declaration(file)).signed_by:
            declared_spec, proposed = declared.spec, proposal.spec
            differing = [
                name.replace("_", " ")
                for name in (
                    "class_names",
                    "image_shape",
                    "window",
                    "slice",
                    "vocabulary",
                    "features",
                )
                if getattr(declared_spec, name) != getattr(proposed, name)
            ]
            if not differing:
                return []
            return [f"the run does not match the owner's declaration in {' and '.join(differing)}"]
        if proposal.settings.privacy is None or identified:
            return []
        return [
            "the owner has not declared the classes and the image size. Put a signed "
            f"{DECLARATION} next to the images, or state them in the policy"
        ]

    def read(self, proposal: Proposal, number: int) -> ImageData:
        """Reads the client's records for a run.

        Raises:
            DataError: if the records do not exist, or do not fit the specification in the proposal.
        """
        privacy = proposal.settings.privacy
        if privacy is None:
            return read_as(FolderSettings(str(self.folder)), proposal.spec, print, TRAIN)
        by_user = privacy.unit == USER
        return read_private_records(self.folder, proposal.spec, print, by_user=by_user)

    def identifier(self, proposal: Proposal) -> str:
        """Returns the identifier of the owner's records in the client's ledger."""
        return f"{proposal.spec.name}-{EXPLICIT}"


class DatasetPart:
    """A part of a published data set, used as an owner's records in trials.

    The data set is partitioned as in a simulation.
    """

    def objections(self, proposal: Proposal, identified: bool) -> list[str]:
        """Returns no objections, because a published data set needs no declaration."""
        return []

    def read(self, proposal: Proposal, number: int) -> ImageData:
        settings = proposal.settings
        train, _ = load_dataset(settings.dataset, None)
        spec = train.spec
        if spec != proposal.spec:
            raise DataError(
                f"the proposed specification of {spec.name} does not match the published one. "
                "Ask the server's operator to correct it"
            )
        labels = train.labels.cpu().numpy()
        parts = partition(labels, settings.resolved_partition, spec.classes, *train.origins())
        return replace(train, may_be_empty=True).subset(np.asarray(parts[number], np.int64))

    def identifier(self, proposal: Proposal) -> str:
        return data_set_id(proposal.settings)


# The source of a node's records.
Source = ClassFolders | DatasetPart


class RecordsError(FedsynthError, code="records.unusable"):
    """Raised if an owner's records or ledger cannot be used for a run."""


@dataclass
class Node(Place):
    """A data owner's node, which answers a server's requests.

    The arguments of `Place` come first.

    Args:
        source: the source of the owner's records.
        ended: the number of runs that have ended.

    Attributes:
        name: the client's name in its ledger and in reports.
        refused: the reason why a server rejected this client. It is empty if no server did.

    Raises:
        LedgerError: if a ledger that existed is missing.
    """

    source: Source = field(kw_only=True)
    ended: int = field(default=0, kw_only=True)
    refused: str = field(default="", init=False)
    _sessions: dict[str, Session] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.name = f"client-{self.number:03d}"
        if self.home.is_dir():
            LedgerFolder(self.home).check_whole()

    def answer(self, run: str, sent: bytes) -> bytes:
        """Answers a server's request. If an error occurs, the answer is a frame with the error.

        Args:
            run: the name of the run that the message claims to belong to.
            sent: the received frame.
        """
        number = None
        with self._locked():
            try:
                frame = Frame.from_bytes(sent)
                number = frame.facts.get("number")
                answer = self._answer(run, frame)
            except Exception as error:
                self.say(f"run {one_line(run, 16)}: {type(error).__name__}: {error}")
                # Text from an owner's file, folder or ledger stays here, and so does the type of
                # the error: a server could otherwise probe classes and sizes until it knew the
                # owner's images.
                public = type(error) in (MessageError, RequestRefusedError)
                answer = Frame(frames.ERROR, {"text": str(error) if public else CANNOT})
        stated = {"client": self.number, "number": number if type(number) is int else None}
        return replace(answer, facts={**answer.facts, **stated}).to_bytes()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Locks the owner's folder, so that only one process answers at a time.

        Each process then sees the state that the previous process has stored. A request that may be
        answered only once is therefore answered once, even if several processes receive the
        request.
        """
        if not self.home.is_dir():  # nothing is created before the owner has joined a run
            yield
            return
        with locked_file(self.home / LOCK, math.inf):
            yield

    def _answer(self, run: str, frame: Frame) -> Frame:
        if frame.kind == frames.JOIN:
            return self._join(run, JoinFacts.of(frame))
        session = self._session(run)
        if frame.kind == frames.REFUSED:
            self.refused = f"{frame.facts.get('reason')!s:.500}"
            return Frame(frames.ANSWER, {})
        if frame.kind == frames.END:
            return self._end(session, EndFacts.of(frame))
        if frame.kind in (frames.KEYS, frames.STEP) and not session.state.attempts:
            for reason in self._approval_used(session.state.proposal):
                raise RequestRefusedError(f"declines: {reason}")
        return session.answer(frame)

    def _join(self, run: str, request: JoinFacts) -> Frame:
        """Joins a run if the owner allows it.

        The server asks a client again after a restart, so the client may have joined before.
        """
        proposal = Proposal.from_json(request.proposal)
        if proposal.run != run:
            raise MessageError(
                f"the message is for run {run:.16}, but its proposal is for run {proposal.run}. "
                f"{SAME_VERSION}"
            )
        clients = proposal.settings.partition.clients
        if self.number >= clients:
            raise MessageError(
                f"client {self.number} is not one of the run's {clients} clients. Start the node "
                "with another number"
            )
        state = self._state(run)
        if state is not None and state.proposal.agreement != proposal.agreement:
            raise MessageError(
                "the run's settings have changed since this client joined. Ask the server's "
                "operator to restore them"
            )
        objections = self._objections(proposal)
        check = StepCheck()
        if state is None and not objections:
            run_settings = proposal.settings
            context = public_context(run_settings, proposal.spec, resolve_device(self.device))
            try:  # a trial of the client's step on public images
                check = check_private_steps(run_settings, context, self.number)
            except FedsynthError as error:  # of public settings and code, so the server may know
                objections.append(str(error))
        declines = f"declines: {'; '.join(objections)}"
        if state is None or objections:
            decision = declines if objections else "joins"
            lines = describe_request(proposal, self.number, self._rows_before(), self.owner.cap)
            self.say("\n".join([*lines, f"  {decision}"]))
        if objections:
            return Frame(frames.REFUSAL, {"reason": declines, "kind": REQUEST})
        session = self._open(proposal, state)
        if state is None:
            session.record_check(check)
            for line in check.warnings:
                self.say(f"  warning: {line}")
        answer = session.join(request.last_round)
        self._sessions[run] = session
        return answer

    def _objections(self, proposal: Proposal) -> list[str]:
        """Returns the client's reasons to reject a run, or an empty list if it takes part.

        The reasons depend only on public values and on what the owner has written (the policy and
        the declaration).
        """
        policy = self.owner.policy
        identified = policy is not None and policy.describes_images
        objections: list[str] = []
        try:
            context = public_context(proposal.settings, proposal.spec, torch.device("cpu"))
            check_executable(proposal, context)
        except FedsynthError as error:
            objections.append(str(error))
        objections += self.owner.objections(proposal, identified=self.identities is not None)
        objections += self.source.objections(proposal, identified)
        objections += self._approval_used(proposal)
        return objections

    def _approval_used(self, proposal: Proposal) -> list[str]:
        """Returns a reason to reject a run if another run has used the owner's approval.

        A manual approval is valid for one run only, unless a bound on ε limits what several runs
        can spend together.
        """
        privacy = proposal.settings.privacy
        if privacy is None and not sums_securely(proposal.settings.method):
            return []
        if privacy is not None and (privacy.epsilon is not None or self.owner.cap is not None):
            return []
        if proposal.agreement not in self.owner.approved or ANY in self.owner.approved:
            return []
        for folder in sorted(self.folder("").glob("*")):
            if folder.name == proposal.run:
                continue
            state = read_state(folder)
            if state and state.attempts and state.proposal.agreement == proposal.agreement:
                return [
                    f"the owner's approval was already used for run {folder.name}. Ask the owner "
                    "for a new approval, or for a policy with a bound on ε"
                ]
        return []

    def _rows_before(self) -> tuple[Release, ...]:
        """Returns the releases recorded so far. Does not create a ledger.

        The result is empty if there is no ledger yet.
        """
        if not self.home.is_dir():
            return ()
        ledger = LedgerFolder(self.home).ledgers().get(self.name)
        return ledger.releases if ledger else ()

    def _state(self, run: str) -> State | None:
        """Returns the client's stored state in a run, or None if it has not joined.

        Raises:
            RequestRefusedError: the folder contains another client's state.
        """
        state = read_state(self.folder(run))
        if state is not None and state.client != self.number:
            raise RequestRefusedError(
                f"the ledger folder of client {self.number} is that of client {state.client} in "
                "this run. Give each client its own folder"
            )
        return state

    def _session(self, run: str) -> Session:
        """Returns the client's session in a run.

        If another process has answered for this client since the last request, the session is
        restored from the files that this process wrote.
        """
        if run in self._sessions and self._sessions[run].current:
            return self._sessions[run]
        state = self._state(run) if RUN_NAME.fullmatch(run) else None
        if state is None:
            raise MessageError("the client has not joined the run. Restart the node and the server")
        identified = self.identities is not None
        if objections := self.owner.objections(state.proposal, identified=identified):
            # the owner may have changed the policy, or withdrawn the approval
            raise RequestRefusedError(f"declines: {'; '.join(objections)}")
        session = self._open(state.proposal, state)
        session.resume()
        self._sessions[run] = session
        return session

    def _open(self, proposal: Proposal, state: State | None) -> Session:
        """Opens a session with the owner's records and the client's permanent ledger."""
        try:
            data = self.source.read(proposal, self.number)
            by_user = protects_users(proposal.settings)
            client = Clients(data, [np.arange(len(data))], (self.name,), by_user)
            [ledger] = LedgerFolder(self.home).open(
                (self.name,), client.digests, self.source.identifier(proposal)
            )
            return Session(self, proposal, data, ledger, state)
        except Exception as error:
            raise RecordsError(f"the owner's records or ledger cannot be used: {error}") from None

    def _end(self, session: Session, request: EndFacts) -> Frame:
        """Ends the run at the server's request, and writes the owner's privacy report."""
        session.accept(request.terms)
        rounds = session.state.proposal.settings.rounds
        if request.rounds > rounds:
            raise RequestRefusedError(
                f"the server's number of rounds must be at most {rounds}, got {request.rounds}"
            ).with_code("request.round")
        statement = session.statement()
        folder = session.folder
        result = session.write_report(request.rounds)
        self.say(f"run {folder.name} ended after {request.rounds} rounds: {result}")
        del self._sessions[folder.name]
        self.ended += 1
        return Frame(frames.ANSWER, statement)

    def write_reports(self) -> None:
        """Writes privacy reports for unfinished runs that have charged the client.

        Call this method when the node stops: a client may never learn that a run has ended.
        """
        with self._locked():
            for folder in sorted(self.folder("").glob("*")):
                if (folder / OWNER).exists() and is_unfinished(folder):
                    try:
                        write_report(owner_report(folder), folder)
                        self.say(f"run {folder.name} did not end. The report is in {folder}")
                    except (FedsynthError, OSError) as error:
                        self.say(f"run {folder.name} has no report: {error}")
