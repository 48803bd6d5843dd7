"""Measures the evidence pack of a synthetic set."""

from __future__ import annotations

from torch import Tensor

from fedsynth.data.images import ImageData, to_stored
from fedsynth.data.shared_set import SharedSet
from fedsynth.errors import SettingError
from fedsynth.evaluation.evidence import Evidence, membership, site_inference
from fedsynth.evaluation.fidelity import fidelity
from fedsynth.features.pretrained import PRETRAINED
from fedsynth.privacy.report.figures import Access
from fedsynth.sharing.fidelity import embedding, features_of

EVIDENCE = "evidence"
# The line of an exported privacy report about the pack.
ACCESS = Access(
    access="training and held-out images, compared with the released images",
    status="simulation-only",
    note=f"exact, in {EVIDENCE}.json, and outside the guarantee. The exporter stated that these "
    "images are public or simulated",
)


class RealImages:
    """The real images with which a released set is compared in its evidence pack.

    Args:
        training: the images from which the set is made.
        held_out: other images of the same distribution, which nothing was made from.
        network: the network whose features are compared, as in `fidelity_of_set`.
        weights: its weights, as in `fidelity_of_set`.
        simulation: True states that all these images are public or simulated. Without this
            statement there is no evidence, because it has exact numbers about the images.

    Raises:
        SettingError: `simulation` is False, the images differ in shape, or the network cannot be
            used.
        UnknownNameError: no feature map has the network's name.

    >>> import tempfile
    >>> from fedsynth import load_dataset, load_synthetic, owner_settings, synthesize
    >>> settings = owner_settings({"model": {"width": 8}, "privacy": {"epsilon": 8}})  # digits
    >>> place = tempfile.mkdtemp()
    >>> run = synthesize(settings, f"{place}/share", runs=f"{place}/runs")
    >>> real = RealImages(*load_dataset("digits"), simulation=True)
    >>> evidence = real.evidence(load_synthetic(f"{place}/share"))
    >>> evidence.membership.low <= evidence.membership.chance
    True
    """

    def __init__(
        self,
        training: ImageData,
        held_out: ImageData,
        network: str = "pixels",
        weights: str = PRETRAINED,
        *,
        simulation: bool = False,
    ) -> None:
        require_statement(simulation)
        self._name = network
        self._shape = training.spec.image_shape
        self._embed = embedding(network, weights, training.spec)
        self._training = self._features(training)
        self._held_out = self._features(held_out)

    def _features(self, data: ImageData) -> tuple[Tensor, Tensor]:
        self._require_shape(data.spec.image_shape)
        return features_of(self._embed, data.images.cpu()), data.labels.cpu()

    def _require_shape(self, shape: tuple[int, ...]) -> None:
        if shape != self._shape:
            reason = f"must all have the shape {self._shape} of the training images, got {shape}"
            raise SettingError(None, "images", f"{reason}. Pass images of this shape")

    def evidence(self, synthetic: SharedSet) -> Evidence:
        """Measures the evidence pack of a synthetic set.

        Raises:
            DataError: there are fewer than two released or held-out images.
            SettingError: the set has another image shape.
        """
        spec, labels = synthetic.spec, synthetic.labels
        self._require_shape(spec.image_shape)
        released = features_of(self._embed, to_stored(synthetic.images, spec))
        counts = labels.bincount(minlength=spec.classes).tolist()
        owners = synthetic.clients
        return Evidence(
            features=self._name,
            training_images=len(self._training[1]),
            held_out_images=len(self._held_out[1]),
            label_counts=dict(zip(spec.class_names, counts, strict=True)),
            membership=membership(released, self._training, self._held_out),
            site_inference=None if owners is None else site_inference(released, owners, labels),
            fidelity=fidelity(released, self._held_out[0]),
        )


def require_statement(simulation: bool) -> None:
    """Checks that the user has stated that the real images are public or simulated.

    Raises:
        SettingError: `simulation` is False.
    """
    if not simulation:
        reason = (
            "must be True, because evidence has exact numbers about the training and held-out "
            "images. If they are public or simulated, set --simulation or simulation=True"
        )
        raise SettingError(None, "simulation", reason)
