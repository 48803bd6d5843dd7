"""Exports a run's model as an ONNX file, for use without PyTorch."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.method import Method
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import OutputError, writing
from fedsynth.files import write_output
from fedsynth.results.saved_model import model_in
from fedsynth.seeding import torch_generator
from fedsynth.sharing.export import verified_report
from fedsynth.version import __version__

TOLERANCE = 1e-3
NEEDS_ONNX = "an ONNX file needs the packages onnx and onnxscript: pip install 'fedsynth[onnx]'"


class FromValues(nn.Module):
    """A classifier for values in their original units instead of normalised values.

    The inputs are pixels in [0, 1], values between the bounds of the data set, or tokens. Values
    outside are clamped, as in training.

    Args:
        network: the classifier, which maps normalised images to logits.
        spec: the specification of the network's input images.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, spec: DatasetSpec) -> None:
        super().__init__()
        self.network = network
        self.low, self.high = spec.bounds or (0.0, 1.0)
        self.tokens = spec.vocabulary > 0
        self.register_buffer("mean", torch.tensor(spec.mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(spec.std).view(1, -1, 1, 1))

    def forward(self, values_NCHW: Tensor) -> Tensor:
        """Computes the logits [N, classes] of values [N, C, H, W]."""
        if self.tokens:
            return self.network(values_NCHW)
        x = values_NCHW.clamp(self.low, self.high).sub(self.low).div(self.high - self.low)
        return self.network((x - self.mean) / self.std)


def export_onnx(
    run: str | Path,
    file: str | Path,
    *,
    unprotected: bool = False,
    method: type[Method] | None = None,
) -> Path:
    """Writes a finished run's model as an ONNX file.

    The input `images` is float32 [N, C, H, W] for any N: pixels in [0, 1], values between the
    bounds of the data set, or tokens. The normalisation is part of the graph. The output `logits`
    is float32 [N, classes]. The metadata of the file contains the names of the classes, the window
    and slice of image files, the encoder of vectors, and the guarantee. Like the model, the file is
    computed from the clients' releases, and so has their guarantee. It contains no source code and
    no paths. Its logits for one image are compared with PyTorch's.

    Args:
        run: the run folder.
        file: the file to write. An existing file is replaced.
        unprotected: if True, also exports the model of a run without a privacy guarantee.
        method: as for `load_model`.

    Returns:
        `file`.

    Raises:
        OutputError: the extra `onnx` is not installed, the run has no guarantee and `unprotected`
            is False, ONNX cannot express the model, or the file cannot be written.
        PrivacyError: the run's privacy report does not follow from its ledgers.

    >>> import tempfile
    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, simulate
    >>> place = tempfile.mkdtemp()
    >>> settings = RunSettings(FedAvg(), rounds=1, model=ModelSettings("linear"))
    >>> run = simulate(settings, output=place)
    >>> export_onnx(run.folder, f"{place}/model.onnx", unprotected=True).name
    'model.onnx'
    """
    folder, target = Path(run), Path(file)
    report = verified_report(folder, unprotected=unprotected, method=method)
    network, architecture = model_in(folder, method)
    spec = architecture.spec
    program = _checked_program(FromValues(network, spec).eval(), spec)
    guarantee = (report or {}).get("guarantee") or {}
    program.model.metadata_props.update(
        made_by=f"fedsynth {__version__}",
        class_names=json.dumps(spec.class_names, ensure_ascii=False),
        window=json.dumps(spec.window),
        slice=json.dumps(spec.slice),
        encoder=spec.encoder,
        epsilon=json.dumps(guarantee.get("epsilon")),
        delta=json.dumps(guarantee.get("delta")),
    )
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_output(target, program.model_proto.SerializeToString())
    return target


def _checked_program(network: nn.Module, spec: DatasetSpec) -> Any:
    """Returns a network's ONNX program for any number of images."""
    try:
        import onnxscript  # noqa: F401
        from onnx_ir.passes.common import ClearMetadataAndDocStringPass
    except ImportError:
        raise OutputError(NEEDS_ONNX) from None
    images = torch.rand(3, *spec.image_shape, generator=torch_generator(0, "examples for ONNX"))
    with torch.no_grad():
        logits = network(images)  # also caches constants, which the exporter cannot create
    try:
        program: Any = torch.onnx.export(
            network,
            (images,),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("N")},),
            dynamo=True,
            verbose=False,
        )
        ClearMetadataAndDocStringPass()(program.model)  # lines of code, and paths of this machine
    except (RuntimeError, ValueError) as error:
        raise OutputError(
            "the model cannot be exported to ONNX, because it has an unsupported operation or a "
            "fixed batch size. Use another feature map or model"
        ).with_code("onnx.operation") from error
    # one image instead of three, because code such as `len(images)` may fix the number
    _check_logits(program.model_proto, images[:1], logits[:1])
    return program


def _check_logits(model: Any, images_NCHW: Tensor, logits_NC: Tensor) -> None:
    """Checks an ONNX model's logits with onnxruntime or, if not installed, with onnx."""
    from onnx.reference import ReferenceEvaluator

    session: Any = ReferenceEvaluator  # which is wrong for some pooling
    name = "the reference evaluator of onnx"
    hint = "Run pip install onnxruntime to run the model with onnxruntime instead"
    with suppress(ImportError):
        from onnxruntime import InferenceSession

        session = partial(InferenceSession, providers=["CPUExecutionProvider"])
        name, hint = "onnxruntime", "Use another model"
    fault, cause = "does not reproduce PyTorch's logits", None
    try:
        (result,) = session(model.SerializeToString()).run(None, {"images": images_NCHW.numpy()})
        if torch.allclose(torch.tensor(result), logits_NC, atol=TOLERANCE, rtol=TOLERANCE):
            return
    except Exception as error:  # onnxruntime's errors have no common class
        fault = "cannot run the model on one image, perhaps because of a fixed batch size"
        cause = error
    raise OutputError(f"the ONNX file is not written, because {name} {fault}. {hint}") from cause
