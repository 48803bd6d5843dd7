"""What goes with a synthetic set that is handed over, and the README for who gets it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedsynth.federation.outputs.saved_model import Architecture
from fedsynth.federation.terms.given_data import PUBLIC
from fedsynth.own_code import is_label
from fedsynth.privacy.report_text import up

TEACHES = """With `teacher=fedsynth.load_model(".")` the run's model labels the copies, which the
network is better for; on the command line it does.
"""
OWN = """
The model stands on code that is not here: {names}. Ask for it, with what it loads. {how}
"""
BY_FILE = (
    '`fedsynth.load_model("THIS_FOLDER", {arguments})` takes it, from a place outside this folder'
)


@dataclass(frozen=True)
class Share:
    """A run's synthetic images, and what goes with them.

    Attributes:
        tensors: `images` float32 [N, C, H, W] with 0 for black and 1 for white, `labels`, and what
            else there is of each image.
        facts: the file's metadata.
        report: the privacy report; None: the run had no differential privacy.
        accuracy: of the run's model on test images; None: not measured.
        learned: whether that model was trained on these images.
        model: the model and what it is, to go with them; None: it stays.
        test: what these images are: "public", "private", or "" where the run says nothing of it.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, str]
    report: dict[str, Any] | None
    accuracy: float | None
    learned: bool
    model: tuple[nn.Module, Architecture] | None
    test: str

    @property
    def class_names(self) -> list[str]:
        names: list[str] = json.loads(self.facts["class_names"])
        return names


def readme(made: Share) -> str:
    """What the recipient reads first."""
    tensors = made.tensors
    facts = made.facts
    report = made.report
    images = tensors["images"]
    names = json.loads(facts["class_names"])
    count, channels, height, width = images.shape
    soft = (
        "- `soft_labels`: float32 [N, classes], which sum to 1, to be learned in place of "
        "`labels`\n"
        if "soft_labels" in tensors
        else ""
    )
    client = (
        "- `client`: int64 [N], the number of the data owner who made the image\n"
        if "client" in tensors
        else ""
    )
    target = "soft_labels" if soft else "labels"
    measured = _measured(made)
    listed = "\n".join(f"| {number} | {name} |" for number, name in enumerate(names))
    return f"""\
# Synthetic images of {facts["data_set"]}

{count} synthetic images, {channels}×{height}×{width}, of {len(names)} classes, made by {facts["made_by"]}. They were
learned so that models trained on them work on real ones, and need not look like anything.
{measured}
{_promise(report)}
## Files

- `synthetic.safetensors`: what to train on
- `images/NN-CLASS/*.png`: the same images to look at, cut off at black and white; the number is the
  row in `synthetic.safetensors`
{_model_file(made)}{_report_files(report)}- `SHA256SUMS`: hashes of all these files (`sha256sum -c SHA256SUMS`)

`synthetic.safetensors` has

- `images`: float32 [N, {channels}, {height}, {width}] in pixel units: 0 is black, 1 is white. Values outside are
  meant: do not cut them off.
- `labels`: int64 [N], by the table below
{soft}{client}
Models take (images − mean) / std with mean {facts["mean"]} and std {facts["std"]} (in pixel units, by
channel); treat real images alike.

| label | class |
| --- | --- |
{listed}

## To train on them

```python
{training_code(images.shape, len(names), facts, soft=bool(soft))}```

With fedsynth installed, `found = fedsynth.load_synthetic(".")` checks the hashes and gives the same
tensors, and `fedsynth.train_student(net, found.normalised(), found.{target})` trains any
network on them, with changed copies and mixtures. On the command line, from another folder than
this one, `fedsynth student THIS_FOLDER` does so.
{_teaches(made)}"""


def _model_file(made: Share) -> str:
    if made.model is None:
        return ""
    return (
        "- `model.safetensors`: the run's model, from images to logits "
        '(`fedsynth.load_model(".")`)\n'
    )


def _teaches(made: Share) -> str:
    """What the run's model is good for, and whose code it needs."""
    if made.model is None:
        return ""
    architecture = made.model[1]
    text = TEACHES if architecture.teaches else ""
    if not architecture.own:
        return text
    names = " and ".join(f"`{name}`" for name in architecture.own.values())
    files = {kind: one.partition("@")[0] for kind, one in architecture.own.items() if is_label(one)}
    if not files:
        return text + OWN.format(names=names, how="")
    how = BY_FILE.format(arguments=", ".join(f'{kind}="PATH/{one}"' for kind, one in files.items()))
    if "features" in files:
        how += f";\nof `fedsynth student` `PATH/{files['features']}` is the option of features"
    return text + OWN.format(names=names, how=f"{how}.")


def _measured(made: Share) -> str:
    """How good the run's model was, and on which images: private ones stand outside a guarantee."""
    if made.accuracy is None:
        return ""
    whose = "public test images" if made.test == PUBLIC else "test images"
    found = f"{100 * made.accuracy:.1f} % accuracy on {whose}"
    if made.learned:
        return f"\nA model that was trained on them had {found}.\n"
    return (
        f"\nThe run's classifier, which was not trained on them, had {found}, and gave them their\n"
        "soft labels. What a model is worth that is trained on them alone was not measured.\n"
    )


def _promise(report: Mapping[str, Any] | None) -> str:
    """What is guaranteed, in a paragraph."""
    if report is None:
        return textwrap.dedent("""\
            **There is no differential privacy.** These images were learned from real ones, or are
            real ones, as any model here was, and nothing is guaranteed to the people in the data.
            """)
    promise = report.get("guarantee")
    if not promise:
        return (
            f"**Nothing is guaranteed**: {report['verdict']['text']}. `privacy_report.html` says "
            "why.\n"
        )
    unit = report["unit"]["one"]
    several = report["unit"]["does_not_protect"]
    return (
        f"**Differential privacy: ε = {up(promise['epsilon'])} at δ = {promise['delta']:g}**, for "
        f"{unit}. Whatever is\ncomputed from these files has that guarantee, too. "
        "`privacy_report.html` says what it rests on and\nwhat it does not cover.\n"
        f"{_against(report)}Not protected: {several}.\n"
    )


def _against(report: Mapping[str, Any]) -> str:
    """Whom it holds against, where clients shared noise; else nothing: everybody."""
    aggregation = report["trust_model"]["secure_aggregation"]
    if aggregation == "none":
        return ""
    return (
        "It does not hold against everybody, as clients shared noise: "
        f"{aggregation.partition(':')[0]}.\nThe report says against whom it holds.\n"
    )


def _report_files(report: Mapping[str, Any] | None) -> str:
    if report is None:
        return ""
    return "- `privacy_report.html`, `.md`, `.json`: what is guaranteed to whom, and what is not\n"


def training_code(
    shape: Sequence[int], classes: int, facts: Mapping[str, str], *, soft: bool
) -> str:
    """Ten lines of PyTorch that train a small network on the set, from within its folder.

    Args:
        shape: [N, C, H, W] of the images.
        classes: how many.
        facts: the set's.
        soft: whether it has soft labels.
    """
    count, channels, height, width = shape
    target = "soft_labels" if soft else "labels"
    steps = min(3000, 300 + count // 5)
    size = 32 * max(1, height // 4) * max(1, width // 4)
    pool = f"nn.AdaptiveAvgPool2d(({max(1, height // 4)}, {max(1, width // 4)}))"
    return f"""\
import torch
from safetensors.torch import load_file
from torch import nn

data = load_file("synthetic.safetensors")
mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in ({facts["mean"]}, {facts["std"]}))
x, y = (data["images"] - mean) / std, data["{target}"]
net = nn.Sequential(nn.Conv2d({channels}, 32, 3, padding=1), nn.ReLU(), {pool},
                    nn.Flatten(), nn.Linear({size}, {classes}))
optimiser = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-3)
for step in range({steps}):
    rows = torch.randint(len(x), (64,))
    loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
    optimiser.zero_grad(), loss.backward(), optimiser.step()
print(f"loss {{loss.item():.3f}}, accuracy {{(net(x).argmax(1) == data['labels']).float().mean():.3f}}")
"""
