"""A privacy guard for federated jobs that others have written. It makes each model update private.

The job's own code trains a model on a client's data, in another framework. The guard sees the model
that the server sent and the one that the client answers with. It clips their difference, charges
the client's ledger, adds noise, and only then lets the answer leave (`fedsynth.deployment` has the
parts for Flower and NVFlare).

Theorem. Let u be the client's whole update in a round: the trained model minus the received one, as
one vector of all floating-point arrays. Let ū = u·min(1, 𝒞/‖u‖₂), with ū = 0 if u is not finite.
Adjacent clients have the same data, or one of them has the update 0 in every round (zero-out).
Then ū differs by at most 𝒞 in L2 norm, and by at most 2𝒞 if one client's data are replaced by any
others (replace-one). So ū + N(0, σ²𝒞²I) is the Gaussian mechanism with noise multiplier σ, nothing
is subsampled, and the rounds compose adaptively: u may depend on everything that the job has kept
on the client, and on every earlier release. This holds for any training, which the guard does not
see. Adding the noisy vector to the received model, which is public, is post-processing. The noise
is that of a single client, so the server need not be trusted. The mean over K clients has noise of
σ𝒞/√K in each coordinate.

What else an answer contains is either public or left out. Whether an array is released follows from
its received name and type, since a job could state records by the choice of its answer's types.
Integers, counts and the arrays of `left_out` are those received. Every answer has all declared
nominal values as its metrics, since a job could state records by the choice of their names.

A repeated request gets the answer that was computed before, without a charge. The answer is on the
disk before it leaves. If a crash comes between charge and answer, the charge counts, and the
repeated request is charged again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsynth.errors import LedgerError, PrivacyError, faults_as, short_repr
from fedsynth.files import file_hash, load_toml, locked_file, write_whole
from fedsynth.privacy.accounting import Totals, calibrate_noise_multiplier
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.ledger.folder import check_names
from fedsynth.privacy.mechanisms import BudgetEnforcer, EpsilonCap, Released
from fedsynth.privacy.plans import ReleasePlan, charge_round
from fedsynth.privacy.randomness import DESCRIPTION, SecretGenerator
from fedsynth.privacy.releases import CLIENT, Release
from fedsynth.privacy.report.build import build_report, write_report
from fedsynth.privacy.report.figures import Access, Part, ReportFacts, Unit
from fedsynth.privacy.report.file import GUARD_SETTINGS, Problem, damaged, read_ledger_rows
from fedsynth.privacy.report.pages import renderer_versions
from fedsynth.privacy.report.verify import Verification, page_problems, report_problems
from fedsynth.version import __version__

DATASET = "all data of a client, behind a guard of model updates"
COUNTS = (
    "*num_batches_tracked"  # of batch norm. Servers average them, so they may be received as floats
)
Arrays = Mapping[str, Any]  # NumPy arrays or tensors by name
Positive = Annotated[float, Field(gt=0)]
_LOGGER = logging.getLogger(__name__)


class GuardSettings(Part):
    """A data owner's public guard settings, in the file guard.toml.

    Attributes:
        clip: 𝒞, the bound on the L2 norm of the client's whole update in a round.
        epsilon, delta: the budget of the client, for all jobs together.
        rounds: the number of rounds, over all jobs, for which the budget suffices. It determines
            the noise multiplier.
        noise_multiplier: σ, in place of `rounds`.
        adjacency: "zero-out" or "replace-one", which doubles the sensitivity.
        left_out: patterns of array names, such as "*.running_var". These arrays are not released.
        nominal: the public values, such as the number of examples, that every answer states as its
            metrics. The job's metrics are dropped.
    """

    clip: Annotated[float, Field(ge=1e-12, le=1e12)]
    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    rounds: Annotated[int, Field(ge=1)] | None = None
    noise_multiplier: Positive | None = None
    adjacency: Literal["zero-out", "replace-one"] = "zero-out"
    left_out: list[str] = Field(default=[])
    nominal: dict[str, float] = Field(default={})

    @classmethod
    def read(cls, file: Path) -> GuardSettings:
        """Reads the settings.

        Raises:
            PrivacyError: the file cannot be read, or a setting is missing, unknown or out of range.
        """
        try:
            table = load_toml(file)
        except (OSError, ValueError) as error:
            raise damaged(
                file, f"cannot read the settings {file}: {error}. Write or correct them"
            ) from None
        with faults_as(partial(damaged, file), f"{file}"):
            settings = cls.model_validate(table)
        if (settings.rounds is None) == (settings.noise_multiplier is None):
            raise damaged(
                file, f"{file} must set either rounds or noise_multiplier. Set exactly one"
            )
        return settings

    @property
    def sigma(self) -> float:
        """The noise multiplier for each update."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        rounds = self.rounds or 1
        return calibrate_noise_multiplier(
            self.epsilon,
            self.delta,
            lambda sigma: Totals.of([(sigma, 1.0, rounds)]),
            self.adjacency,
        )


def noisy_update(
    update_D: Tensor,
    plan: ReleasePlan,
    sigma: float,
    enforcer: BudgetEnforcer,
    secret: SecretGenerator,
) -> Released:
    """Charges the ledger for one update [D], then clips the update and adds noise.

    Args:
        update_D: the client's whole update, [D].
        plan: the release, with its clip.
        sigma: the noise multiplier.
        enforcer: the client's ledger and cap.
        secret: the client's secret generator.

    Raises:
        BudgetExceededError: the update would exceed the budget. Nothing was charged or drawn.
    """
    number = len(enforcer.ledger.releases) + 1
    mechanism = charge_round([plan], number, sigma, enforcer, secret).take(plan.name)
    mechanism.sample(1)
    mechanism.add(update_D[None], torch.zeros(1, dtype=torch.int64))
    return Released(mechanism.release()[0])


class UpdateGuard:
    """A guard that makes one client's model updates private.

    Args:
        folder: the folder with guard.toml, in which ledgers and reports are kept. All jobs on the
            client's data must use the same folder.
        client: the client's name (see `check_names`).

    Raises:
        PrivacyError: guard.toml is missing or wrong.
        LedgerError: the ledger cannot be used.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> settings = ["clip = 1.0", "epsilon = 8", "delta = 1e-5", "rounds = 1"]
    >>> _ = (folder / "guard.toml").write_text("\\n".join(settings))
    >>> guard = UpdateGuard(folder, "clinic-a")
    >>> received, trained = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    >>> guard.protect(["round 1"], received, trained)["w"].shape
    torch.Size([3])
    >>> guard.protect(["round 2"], received, trained)
    Traceback (most recent call last):
    ...
    fedsynth.errors.BudgetExceededError: the planned release would raise ε of client 'clinic-a' ...
    """

    def __init__(self, folder: Path | str, client: str) -> None:
        self.folder = Path(folder)
        (self.client,) = check_names([client], 1)
        self.settings = GuardSettings.read(self.folder / GUARD_SETTINGS)
        self._stated = file_hash(self.folder / GUARD_SETTINGS)
        ledger = self.folder / f"{self.client}.jsonl"
        if self._answer_file.exists() and not ledger.exists():
            raise LedgerError(
                f"the ledger {ledger} is missing, but client {self.client} has sent updates. "
                "Restore it from a backup"
            ).with_code("ledger.missing")
        self._ledger = Ledger(self.client, ledger, dataset=DATASET)
        cap = EpsilonCap(self.settings.epsilon, self.settings.delta)
        self._enforcer = BudgetEnforcer(
            self._ledger, [cap], adjacency=self.settings.adjacency, unit=CLIENT
        )
        self._secret = SecretGenerator()

    @property
    def _answer_file(self) -> Path:
        """The file with the last protected answer."""
        return self.folder / f"{self.client}.safetensors"

    def protect(
        self,
        request: Sequence[object],
        received: Arrays,
        answer: Arrays,
        *,
        difference: bool = False,
    ) -> dict[str, Any]:
        """Makes a client's answer private, and returns the arrays to send instead of the answer.

        Args:
            request: what identifies the request besides the received arrays, such as the names of
                job and task and the number of the round.
            received: the arrays that the server sent.
            answer: the arrays with which the job answers, with the same names and shapes.
            difference: True if the answer is the update itself, False if it is the trained model.

        Returns:
            Arrays with the names, shapes and types of those received.

        Raises:
            BudgetExceededError: the answer would exceed the budget. Nothing was charged.
            PrivacyError: the names, shapes or types differ. Nothing was charged.
        """
        public = {name: _tensor(name, value) for name, value in received.items()}
        trained = {name: _tensor(name, value) for name, value in answer.items()}
        self._check_same(public, trained)
        self._note_unmatched(public)
        names = [name for name, array in public.items() if self._released(name, array)]
        leaving = {name: torch.zeros_like(t) if difference else t for name, t in public.items()}
        if names:
            update = [(_exact(trained[name]) - _exact(leaving[name])).flatten() for name in names]
            digest = _digest([*request, difference, self._stated], public)
            noisy = self._answer(digest, torch.cat(update)).double()
            for name, part in zip(names, noisy.split(list(map(len, update))), strict=True):
                base = leaving[name]
                total = _exact(base) + part.view(base.shape)
                leaving[name] = total.to(base.device, base.dtype)
        return {
            name: tensor if isinstance(received[name], Tensor) else tensor.numpy()
            for name, tensor in leaving.items()
        }

    @property
    def nominal(self) -> dict[str, int | float]:
        """The declared public numbers that each answer contains instead of the job's metrics."""
        nominal = self.settings.nominal
        return {name: int(x) if x.is_integer() else x for name, x in nominal.items()}

    def _released(self, name: str, received: Tensor) -> bool:
        patterns = (COUNTS, *self.settings.left_out)
        public = any(fnmatchcase(name, pattern) for pattern in patterns)
        return received.is_floating_point() and received.numel() > 0 and not public

    def _note_unmatched(self, received: Mapping[str, Tensor]) -> None:
        """Warns of patterns in `left_out` that match no array, whose arrays may be released."""
        for pattern in self.settings.left_out:
            if not any(fnmatchcase(name, pattern) for name in received):
                _LOGGER.warning(
                    "no array of the request matches the pattern %r in left_out of guard.toml. "
                    "Correct the pattern if it should match",
                    pattern,
                )

    def _check_same(self, received: Mapping[str, Tensor], answer: Mapping[str, Tensor]) -> None:
        for name in sorted(received.keys() | answer.keys()):
            sent, trained = received.get(name), answer.get(name)
            if (
                sent is None
                or trained is None
                or sent.shape != trained.shape
                or (trained.is_floating_point() and not sent.is_floating_point())
            ):
                raise PrivacyError(
                    f"array {short_repr(name)} is {_kind(trained)} in the answer of client "
                    f"{self.client!r}'s job, and {_kind(sent)} in the request. Return the "
                    "request's arrays"
                ).with_code("guard.arrays")

    def _stored_answer(self, digest: str) -> Tensor | None:
        try:
            with safe_open(self._answer_file, "pt") as answers:
                if digest in answers.keys():  # noqa: SIM118  # no mapping
                    stored: Tensor = answers.get_tensor(digest)
                    return stored
        except SafetensorError:
            raise LedgerError(
                f"the stored answer {self._answer_file} is damaged. Restore it from a backup, or "
                "delete it to answer and charge the request again"
            ).with_code("guard.answer") from None
        return None

    def _answer(self, digest: str, update_D: Tensor) -> Tensor:
        """Returns a new noisy update, or the stored one for a repeated request."""
        sent = self._answer_file
        with locked_file(self.folder / f"{self.client}.lock"):
            if sent.exists() and (stored := self._stored_answer(digest)) is not None:
                return stored
            plan = ReleasePlan(
                name="update",
                quantity="model update",
                mechanism="gaussian",
                clipped="the client's whole update",
                clip=self.settings.clip,
                sample_rate=1.0,
                steps=1,
                dimension=len(update_D),
            )
            if not torch.isfinite(update_D).all():
                _LOGGER.warning(
                    "the update of client %s has a NaN or an infinity, so it counts as zero. Lower "
                    "the job's learning rate",
                    self.client,
                )
            noisy = noisy_update(update_D, plan, self.settings.sigma, self._enforcer, self._secret)
            self._ledger.note_files(self._stated, repeated=True)  # before anything may leave
            write_whole(sent, safetensors.torch.save({digest: noisy}))
        with locked_file(self.folder / "report.lock"):
            write_report(guard_report(self.folder), self.folder)
        return noisy


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        kind = getattr(value, "dtype", type(value).__name__)
        raise PrivacyError(
            f"array {short_repr(name)} of type {kind} cannot be converted to a tensor. Use float32 "
            "in both the server's model and the job's"
        ).with_code("guard.arrays") from None


def _kind(tensor: Tensor | None) -> str:
    """Describes a tensor's type and shape, in a message."""
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float64)


def _digest(request: Sequence[object], received: Mapping[str, Tensor]) -> str:
    """Computes the hash of a request and its arrays, which are all public."""
    hashed = hashlib.sha256(repr(request).encode())
    for name, tensor in received.items():
        hashed.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        hashed.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


# -------------------------------------------------------------------------------------- the report


def guard_facts(folder: Path, rows: Iterable[Sequence[Release]]) -> ReportFacts:
    """Returns the facts in a guard's report that the ledgers do not contain.

    Args:
        folder: the guard's folder.
        rows: the rows of each ledger.

    Raises:
        PrivacyError: guard.toml is missing or damaged.
    """
    settings = GuardSettings.read(folder / GUARD_SETTINGS)
    rounds = max(map(len, rows), default=0)
    nominal = ", ".join(f"{name} = {value:g}" for name, value in settings.nominal.items())
    return ReportFacts(
        method="guarded job (of another framework)",
        mechanism="gaussian",
        delta=settings.delta,
        epsilon_cap=settings.epsilon,
        planned_rounds=max(settings.rounds or rounds, rounds),
        rounds_done=rounds,
        public_items={
            "data set": "what the job reads at the client, which the guard does not see",
            "clip": f"{settings.clip:g}, stated by the data owner",
            "nominal metrics": nominal or "none",
            "arrays left out": ", ".join(settings.left_out) or "none but integers",
        },
        ledger_kept=True,
        randomness=DESCRIPTION,
        scope=[
            Access(access="the job's training", status="accounted", note="as one clipped update"),
            Access(access="metrics", status="public", note="dropped, or nominal values instead"),
        ],
        adjacency=settings.adjacency,
        unit=Unit(kind=CLIENT),
        provenance={
            "config": file_hash(folder / GUARD_SETTINGS),
            "fedsynth": __version__,
            "dp-accounting": version("dp-accounting"),
            **renderer_versions(),
        },
        noise_multiplier=settings.sigma,
        simulated=False,
    )


def guard_report(folder: Path) -> dict[str, Any]:
    """Builds one privacy report for all clients in a guard's folder, from their ledgers.

    Raises:
        PrivacyError: guard.toml or a ledger is damaged.
    """
    histories = [read_ledger(path).history() for path in sorted(folder.glob("*.jsonl"))]
    facts = guard_facts(folder, [history.releases for history in histories])
    return build_report(facts, histories)


def verify_guard(folder: Path, report: Mapping[str, Any], ledger: Path | None) -> Verification:
    """Recomputes a guard's report from its settings and ledgers, and lists all differences.

    Args:
        folder: the guard's folder.
        report: a report that `schema_problems` has found valid.
        ledger: the folder of the ledger files. None is the guard's folder.

    Raises:
        PrivacyError: guard.toml is missing or damaged.
    """
    rows = read_ledger_rows(report, ledger or folder, exact=True)
    facts = guard_facts(folder, rows.rows.values())
    problems, notes = page_problems(report, folder)
    problems += rows.problems
    stated = file_hash(folder / GUARD_SETTINGS)
    for client, charged in rows.ledgers.items():
        hashes = [noted for _, noted in charged.lines.files]
        if len(hashes) > 1:
            notes.append(
                f"{client}'s updates were charged with {len(hashes)} successive versions of "
                f"{GUARD_SETTINGS}, of which the report states the last"
            )
        if charged.releases and hashes[-1:] != [stated]:
            text = f"the ledger of {client} was charged with settings other than {GUARD_SETTINGS}"
            problems.append(Problem(f"files.{GUARD_SETTINGS}", text))
    problems += report_problems(report, facts, rows, {})
    return Verification(problems, [rows.note, *notes])
