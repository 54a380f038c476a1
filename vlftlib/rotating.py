"""Rotating rows of features, and a frozen linear layer with a rotated weight or input.

Because R is orthogonal, its gradient needs only x and the dx that the backward computes anyway: dR = x^T (dx R) = (x^T dx) R.
For the Cayley map the last R cancels (see `mapping.CayleyMap`), so x^T dx is handed back as it is. Nothing of token size is
saved beyond the layer's own input.

Factors are the change R - I, not R: rounded to bf16 they keep their relative accuracy, and a new adapter adds exact zeros.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

# CPU libraries walk a token-long product with strides of a page badly: in parts it is 1.3 times as fast in float32 and 4 to 20
# times in bf16. Accelerators take one launch.
TOKENS_AT_ONCE = 512


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype, float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def _rotate(rows: Tensor, factors: tuple[Tensor, ...], transpose: bool) -> Tensor:
    """rows R, or rows R^T. Factors: (R - I,) in blocks (n, b, b), or (P, U) of R = I - P U^T. rows: (..., in_features)."""
    flat = rows.reshape(-1, rows.shape[-1])
    if len(factors) == 2:
        left, right = factors[::-1] if transpose else factors
        return torch.addmm(flat, flat @ left, right.mT, alpha=-1).view(rows.shape)
    (change,) = factors
    parts = flat.unflatten(1, (len(change), -1)).transpose(0, 1)  # (blocks, rows, block size)
    change = change.mT if transpose else change
    if torch.compiler.is_compiling():  # torch.compile takes no writes through views in an autograd function
        return torch.baddbmm(parts, parts, change).transpose(0, 1).reshape(rows.shape)
    result = flat.clone(memory_format=torch.contiguous_format)
    result.view(-1, *parts.shape[::2]).transpose(0, 1).baddbmm_(parts, change)  # in place: no second copy for the layout
    return result.view(rows.shape)


def _outer(x: Tensor, dx: Tensor, blocks: int) -> Tensor:
    """x^T dx of the diagonal blocks: (tokens, in_features) twice to (blocks, block size, block size)."""
    x, dx = x.unflatten(1, (blocks, -1)).permute(1, 2, 0), dx.unflatten(1, (blocks, -1)).transpose(0, 1)
    if x.device.type != "cpu" or torch.compiler.is_compiling() or x.shape[2] <= TOKENS_AT_ONCE:
        return torch.bmm(x, dx)
    total = x.new_zeros(dx.shape[0], dx.shape[2], dx.shape[2], dtype=wide(x.dtype))
    for some_x, some_dx in zip(x.split(TOKENS_AT_ONCE, dim=2), dx.split(TOKENS_AT_ONCE, dim=1)):
        total += torch.bmm(some_x, some_dx)
    return total


def _gradients(x: Tensor, dx: Tensor, scale: Tensor | None, factors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of the scale and the factors from the layer's input and its gradient, for orthogonal R.

    Blocks: x^T dx, which `mapping.CayleyMap` expects in place of dR = (x^T dx) R. Householder, with dR = x^T dx R: dP = -dR U and
    dU = -dR^T P, by thin products. Scale: ds = sum(x * dx) / s.
    """
    x, dx = x.reshape(-1, x.shape[-1]), dx.reshape(-1, x.shape[-1])
    if len(factors) == 1:
        outer = _outer(x, dx, len(factors[0]))
        return None if scale is None else outer.diagonal(dim1=1, dim2=2).sum(dtype=scale.dtype) / scale, outer
    left, right = factors
    rotated_right = right - left @ (right.mT @ right)
    change = dx.mT @ (x @ left)
    grads = -(x.mT @ (dx @ rotated_right)), right @ (left.mT @ change) - change
    return None if scale is None else (x * dx).sum(dtype=scale.dtype) / scale, *grads


class RotateInput(torch.autograd.Function):
    """z = s x R, saving x and the factors only."""

    @staticmethod
    def forward(ctx, x, scale, *factors):
        ctx.save_for_backward(x, scale, *factors)
        rotated = _rotate(x, factors, transpose=False)
        return rotated if scale is None else rotated.mul_(scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, scale, *factors = ctx.saved_tensors
        dx = _rotate(grad, factors, transpose=True)
        if scale is not None:
            dx = dx.mul_(scale)
        return dx if ctx.needs_input_grad[0] else None, *_gradients(x, dx, scale, factors)


def rotate_by_any(x: Tensor, scale: Tensor | None, change: Tensor) -> Tensor:
    """z = s x R for blocks R that need not be orthogonal, by torch's own backward."""
    parts = x.reshape(-1, len(change), change.shape[-1]).transpose(0, 1)  # (blocks, tokens, block size)
    rotated = torch.baddbmm(parts, parts, change).transpose(0, 1).reshape(x.shape)
    return rotated if scale is None else rotated * scale


class LinearOfRotatedWeight(torch.autograd.Function):
    """y = x (s W R^T)^T + b, saving x, W and the factors only: the rotated weight is computed again in the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, scale, *factors):
        ctx.quant_state = getattr(weight, "quant_state", None)
        ctx.save_for_backward(x, weight, scale, *factors)
        rotated = rotated_weight(weight, ctx.quant_state, x.dtype, scale, factors)
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, rotated, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale, *factors = ctx.saved_tensors
        rotated = rotated_weight(weight, ctx.quant_state, x.dtype, scale, factors)
        dx = grad @ rotated
        return dx if ctx.needs_input_grad[0] else None, None, None, *_gradients(x, dx, scale, factors)


def rotated_weight(weight: Tensor, quant_state, dtype: torch.dtype, scale: Tensor | None, factors) -> Tensor:
    with torch.autocast(weight.device.type, enabled=False):
        if quant_state is not None:
            from bitsandbytes.functional import dequantize_4bit

            weight = dequantize_4bit(weight, quant_state)
        rotated = _rotate(weight.to(dtype), factors, transpose=True)
        return rotated if scale is None else rotated.mul_(scale)


def base_forward(x: Tensor, layer: nn.Linear, quantization: str | None) -> Tensor:
    """The frozen layer on an input in its dtype; none of the three saves a tensor of token size."""
    if quantization == "8-bit":
        return layer(x)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    if quantization == "4-bit":
        # not the layer itself: on CPUs its inference repacks the weight, which from then on dequantises to noise
        from bitsandbytes import matmul_4bit

        return matmul_4bit(x, layer.weight, bias=bias, quant_state=layer.weight.quant_state)
    return linear(x, layer.weight.to(x.dtype), bias)
