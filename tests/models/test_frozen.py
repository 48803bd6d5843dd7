"""The hand-derived VJP of frozen ConvNets, against autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsynth.models.convnet import ConvNet
from fedsynth.models.registry import ModelSettings, build_model

Shape = tuple[int, int, int]


def random_network(shape: Shape, width: int, depth: int, norm: str = "instance") -> ConvNet:
    """With affine weights of both signs and away from one and zero, so that every term of the VJP
    is seen."""
    settings = ModelSettings(width=width, depth=depth, norm=norm)
    net = build_model(settings, shape, 10, 0).requires_grad_(False)
    assert isinstance(net, ConvNet)
    generator = torch.Generator().manual_seed(0)
    for p in net.parameters():
        p.add_(0.5 * torch.randn(p.shape, generator=generator))
    return net


def drawn(*shape: int) -> Tensor:
    """The same numbers in every run, whatever ran before."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def by_autograd(net: ConvNet, x: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    h = net.embed(leaf)
    rows = [torch.autograd.grad(h, leaf, v, retain_graph=True)[0] for v in vectors]
    return h.detach(), torch.stack(rows)


@pytest.mark.parametrize(
    ("shape", "width", "depth"),
    [((1, 28, 28), 6, 3), ((6, 8, 16), 3, 3), ((1, 8, 8), 1, 1)],
)
def test_embedding_and_vjp_equal_autograd(
    shape: Shape, width: int, depth: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # both sides in float32
    net = random_network(shape, width, depth).to(device)
    x = drawn(5, *shape).to(device)
    vectors = drawn(3, 5, net.embedding_size).to(device)
    made = net.embed_vjp(x)
    assert made is not None
    h, expected = by_autograd(net, x, vectors)
    torch.testing.assert_close(made[0], h, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(made[1](vectors), expected, atol=1e-4, rtol=1e-3)
    assert made[1](vectors[:1]).shape == (1, 5, *shape)


def test_a_reduced_precision_rounds_the_vectors_only() -> None:
    net, x = random_network((1, 28, 28), 16, 3), drawn(4, 1, 28, 28)
    vectors = drawn(2, 4, net.embedding_size)
    made = net.embed_vjp(x, torch.bfloat16)
    assert made is not None
    h, expected = by_autograd(net, x, vectors)
    torch.testing.assert_close(made[0], h, atol=2e-5, rtol=1e-4)
    pulled = made[1](vectors)
    assert pulled.dtype == torch.float32
    assert 0 < (pulled - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    ("shape", "norm"),
    [((1, 8, 8), "group"), ((1, 8, 8), "batch"), ((1, 8, 8), "none"), ((1, 12, 12), "instance")],
)
def test_only_the_frozen_path_exists(shape: Shape, norm: str) -> None:
    """Other norms, and a 12×12 image whose third block would pool a row of three."""
    assert random_network(shape, 4, 3, norm).embed_vjp(drawn(2, *shape)) is None
