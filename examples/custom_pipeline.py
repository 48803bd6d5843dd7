"""Creates a private synthetic dataset for a single data owner, without a federation and without the
command line.

The owner's ledger is charged when `condense` starts. Everything after that, such as training a
model on the synthetic records, is post-processing and costs no budget.
"""

import torch

from fedsynth import load_dataset, privacy, synthesizer
from fedsynth.methods.kit import ConvNet


def main() -> float:
    """Creates the synthetic dataset, trains a model on it, and returns the model's test
    accuracy.
    """
    train, test = load_dataset("digits")
    owner = privacy.DataOwner(
        "clinic-a",
        train.images / 255,
        train.labels,
        classes=10,
        nominal_size=1400,  # a public statement, not len(train)
        bounds=(0, 1),
        epsilon=5,
        delta=1e-5,
    )
    objective = synthesizer.ResidualMatching(owner, network, clip=3.0, steps=30)
    synthetic = synthesizer.condense(objective, per_class=10, lr=1.0)
    student = network()
    synthesizer.train_student(student, synthetic.x, synthetic.y)
    with torch.no_grad():
        right = student(test.images / 255).argmax(dim=1) == test.labels
    accuracy = float(right.double().mean())
    print(f"ε = {owner.spent():.2f}: {accuracy:.1%} with {len(synthetic.y)} synthetic images")
    return accuracy


def network() -> ConvNet:
    return ConvNet((1, 8, 8), classes=10, width=32, depth=2)


if __name__ == "__main__":
    main()
