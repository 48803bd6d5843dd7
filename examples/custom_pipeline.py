"""A custom synthesis pipeline: one data owner makes a private synthetic set, without a federation
and without the command line.

It uses FedDM's building blocks. A guard holds the owner's ledger and cap. The planned releases are
charged first, which opens a series of private steps. Only the matcher uses the data; everything
after it is post-processing. Here each step uses freshly initialised networks (distribution matching
as in Zhao & Bilen 2021), whereas FedDM perturbs a global model.
"""

from itertools import count
from typing import Any

import torch

from fedsynth import ModelSettings, load_dataset
from fedsynth.core.client import PrivateClients
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.models.registry import build_model
from fedsynth.privacy.accounting import calibrate_noise_multiplier, epsilon
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.plans import PrivatePlan, authorise
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.loop import condense
from fedsynth.synthesizer.condensation.matchers import ResidualMatcher
from fedsynth.synthesizer.condensation.sets import noise_start, split_uploads
from fedsynth.training.optimisers import MomentumSgd
from fedsynth.training.sgd import SgdSettings, train_on

STEPS = 30
IPC = 10
CLIP = 3.0
DELTA = 1e-5
BUDGET = 5.0


def main() -> float:
    """Creates the set, trains a model on it and returns the model's test accuracy."""
    train, test = load_dataset("digits")
    spec = train.spec
    model = ModelSettings(width=32, depth=2)
    network: Any = build_model(model, spec.image_shape, spec.classes, 0)
    width: int = network.embedding_size + spec.classes

    plan = PrivatePlan(
        name="images",
        quantity="synthetic images",
        mechanism="residual",
        clipped="residual of each example",
        clip=CLIP,
        sample_rate=1.0,
        steps=STEPS,
        dimension=spec.classes * width,
        groups=spec.classes,
    )
    sigma = calibrate_noise_multiplier(BUDGET, DELTA, lambda sigma: [plan.release(1, sigma)])
    ledger = Ledger("owner")
    charged = authorise([plan], 1, sigma, Guard(ledger, DELTA, cap=BUDGET), SecretGenerator())
    owner = PrivateClients([0], train, [torch.arange(len(train))], [charged])

    seeds = count(1)
    images = condense(
        noise_start([0], owner.segments(), IPC, spec.image_shape, seed=0),
        lambda: build_model(model, spec.image_shape, spec.classes, next(seeds)).requires_grad_(
            False
        ),
        ResidualMatcher(owner, owner.series("images"), divisor=spec.train_size / spec.classes),
        steps=STEPS,
        optimiser=MomentumSgd(5.0),
    )
    (synthetic,) = split_uploads(images, owner.segments(), clients=1)

    student = build_model(model, spec.image_shape, spec.classes, 0)
    sgd = SgdSettings(epochs=200, batch=50, optimiser=MomentumSgd(0.01, 0.9))
    train_on(
        student, lambda i: synthetic.images[i], synthetic.labels, sgd, torch_generator(0, "student")
    )
    print(
        f"ε = {epsilon(ledger.releases, DELTA):.2f} at δ = {DELTA:g}, σ = {sigma:.2f}: ",
        end="",
    )
    result = accuracy(student, test)
    print(f"{100 * result:.1f} % with {len(synthetic.labels)} synthetic images")
    return result


if __name__ == "__main__":
    main()
