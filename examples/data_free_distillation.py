"""Distils a Fashion-MNIST teacher into a student that never sees a real image.

    FEDSYNTH_DATA=DIR python examples/data_free_distillation.py [--steps 3000]

This is a small version of FedKF's Table IV. The teacher, a LeNet-5, is trained as usual. The
student learns only from the images of a generator. The generator is trained against the teacher to
produce all classes equally often and with some confidence. At the end, the teacher classifies a
batch of generated images, because a collapsed generator produces only one or two classes. The
example takes about half an hour on a CPU core. `git show 04719c52:benchmarks/generator_scale.py`
compares loss weights, learning rates and replay on held-out images.
"""

from __future__ import annotations

import argparse
import sys

from fedsynth import DataFreeDistiller, ModelSettings, load_dataset
from fedsynth.methods.kit import (
    MomentumSgd,
    SgdSettings,
    accuracy,
    build_model,
    format_facts,
    normalise,
    torch_generator,
    train_on,
)


def main(
    dataset: str = "fashion-mnist", model: str = "lenet5", epochs: int = 8, steps: int = 3000
) -> tuple[float, float]:
    """Returns the test accuracy of the teacher and of the student."""
    train, test = load_dataset(dataset)
    spec = train.spec
    settings = ModelSettings(model, width=16, depth=2)
    teacher, student = (
        build_model(settings, spec.image_shape, spec.classes, seed) for seed in (0, 1)
    )
    sgd = SgdSettings(epochs, batch=128, optimiser=MomentumSgd(0.05, 0.9, 5e-4))
    train_on(
        teacher,
        lambda i: normalise(train.images[i], spec),
        train.labels,
        sgd,
        torch_generator(0, "teacher"),
    )
    print(f"teacher {100 * accuracy(teacher, test):.2f} %")

    def report(step: int, total: int) -> None:
        if step % (total // 5) == 0:
            print(f"  step {step}/{total}", file=sys.stderr)

    values = {
        "batch": 256,
        "one_hot_weight": 0.05,
        "activation_weight": 0.0,
        "learning_rate": 0.1,
        "replay": 8,
        "width": 16,
    }
    distiller = DataFreeDistiller(teacher, spec, steps=steps, **values)  # type: ignore[arg-type]
    generator = distiller.fit(student, report)
    print(f"student {100 * accuracy(student, test):.2f} %, without any image")
    print(f"generated: {format_facts(distiller.facts(generator))}")
    return accuracy(teacher, test), accuracy(student, test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000)
    main(steps=parser.parse_args().steps)
