"""GWC: the gradient at the LayerNorm's input is 1/ḡ times the plain one, and nothing else changes (UB §5.1)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from normalign.norms.aligner import EPS, LayerNormAligner
from normalign.norms.gwc import compensate

WIDTH = 8


def aligner(gain: Tensor, bias: Tensor, gwc: bool) -> LayerNormAligner:
    """A LayerNorm aligner with the given gain and bias, in training mode and their precision."""
    layer = LayerNormAligner(len(gain), 1.0, gwc=gwc).to(gain.dtype)
    layer.weight.data, layer.bias.data = gain.clone(), bias.clone()
    return layer


def gradients(layer: LayerNormAligner, x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, gain and bias for the incoming gradient ``seed``."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    layer(x).backward(seed)
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    return x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()


def scaled_at_x_hat(x: Tensor, gain: Tensor, bias: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's own form, unfused: the gradient of the normalised activation is divided by mean|g|."""
    x, gain, bias = (t.clone().requires_grad_() for t in (x, gain, bias))
    x_hat = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + EPS)
    x_hat.register_hook(lambda grad: grad / gain.detach().abs().mean())
    (x_hat * gain + bias).backward(seed)
    assert x.grad is not None and gain.grad is not None and bias.grad is not None
    return x.grad, gain.grad, bias.grad


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input (2, 3, D), gain with negative and zero entries, bias, and incoming gradient, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x, out = (torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    gain, bias = (torch.randn(WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    gain[0] = 0.0
    gain[1] = -gain[1].abs() - 0.1
    return x, gain * 0.05, bias, out


class InDouble(LayerNormAligner):
    """The aligner computes in float32; here only the compensation and the kernel are wanted, in float64."""

    def forward(self, x: Tensor) -> Tensor:
        x = compensate(x, self.weight) if self.gwc and self.training else x
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, EPS)


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_input_gradient_is_exactly_the_plain_one_over_mean_gain_and_equals_scaling_at_x_hat(seed: int) -> None:
    x, gain, bias, out = inputs(seed)
    results = []
    for gwc in (False, True):
        layer = InDouble(WIDTH, 1.0, gwc=gwc).double()
        layer.weight.data, layer.bias.data = gain.clone(), bias.clone()
        results.append(gradients(layer, x, out))
    plain, compensated = results
    torch.testing.assert_close(compensated[0], plain[0] / gain.abs().mean(), rtol=1e-9, atol=1e-12)
    assert torch.equal(compensated[1], plain[1]) and torch.equal(compensated[2], plain[2])
    for ours, papers in zip(compensated, scaled_at_x_hat(x, gain, bias, out), strict=True):
        torch.testing.assert_close(ours, papers, rtol=1e-9, atol=1e-12)


def test_the_aligner_itself_compensates_to_float32_rounding() -> None:
    x, gain, bias, out = (t.float() for t in inputs(1))
    ours = gradients(aligner(gain, bias, True), x, out)
    for got, expected in zip(
        ours, scaled_at_x_hat(x.double(), gain.double(), bias.double(), out.double()), strict=True
    ):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_bitwise_the_same_with_and_without_gwc(dtype: torch.dtype) -> None:
    x, gain, bias, _ = (t.float() for t in inputs(2))
    outputs = [aligner(gain, bias, gwc)(x.to(dtype)) for gwc in (False, True)]
    assert torch.equal(*outputs) and outputs[0].dtype == dtype


def test_gwc_acts_in_training_mode_only() -> None:
    x, gain, bias, out = (t.float() for t in inputs(3))
    plain = gradients(aligner(gain, bias, False), x, out)[0]
    layer = aligner(gain, bias, True).eval()
    assert torch.equal(gradients(layer, x, out)[0], plain)
    assert not torch.equal(gradients(layer.train(), x, out)[0], plain)


def test_fault_14_checkpointing_compensates_exactly_once() -> None:
    x, gain, bias, out = (t.float() for t in inputs(4))
    direct = gradients(aligner(gain, bias, True), x, out)
    layer, again = aligner(gain, bias, True), x.clone().requires_grad_()
    checkpoint(layer, again, use_reentrant=False).backward(out)
    for got, expected in zip((again.grad, layer.weight.grad, layer.bias.grad), direct, strict=True):
        assert got is not None and torch.equal(got, expected)


def test_fault_14_a_shared_aligner_compensates_each_path_once() -> None:
    x, gain, bias, out = (t.float() for t in inputs(5))
    layer = aligner(gain, bias, True)
    a, b = x.clone().requires_grad_(), (x * 2 + 1).clone().requires_grad_()
    (layer(a) + layer(b)).backward(out)
    for leaf in (a, b):
        single = gradients(aligner(gain, bias, True), leaf.detach(), out)[0]
        assert leaf.grad is not None and torch.equal(leaf.grad, single)


def test_a_gain_of_zeros_gives_a_zero_gradient_not_nan() -> None:
    x, _, _, out = (t.float() for t in inputs(6))
    grad = gradients(aligner(torch.zeros(WIDTH), torch.zeros(WIDTH), True), x, out)[0]
    assert torch.equal(grad, torch.zeros_like(grad))


def test_without_gwc_the_layer_norm_passes_gradcheck_in_float64() -> None:
    x, gain, bias, _ = inputs(7)
    layer = InDouble(WIDTH, 1.0).double()

    def apply(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": gain, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(apply, [t.requires_grad_() for t in (x, gain, bias)])


def test_gain_of_target_norm_over_root_width_gives_that_output_norm() -> None:
    target, width = 3.202, 576
    layer = LayerNormAligner(width, target)
    assert layer.weight.unique().item() == pytest.approx(target / math.sqrt(width))
    norms = layer(torch.randn(50, width, generator=torch.Generator().manual_seed(0)) * 12).norm(dim=-1)
    torch.testing.assert_close(norms, torch.full((50,), target), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("gain", "limit", "factor"), [(0.1, 3.0, 3.0), (0.5, 3.0, 2.0), (0.1, None, 10.0)])
def test_a_limit_bounds_the_factor_and_nothing_else(gain: float, limit: float | None, factor: float) -> None:
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4).requires_grad_()
    y = compensate(x, torch.full((4,), -gain, dtype=torch.float64), limit)
    assert torch.equal(y, x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, factor), rtol=1e-12, atol=0)
