"""Orthogonal fine-tuning of a linear layer: y = s W (x R) + b with W frozen, R a trainable rotation, s an optional scale.

What is unusual here:
- Either side is rotated: the weight (W R^T, cost independent of the batch) where tokens outnumber output features, else the
  input. Because R is orthogonal, its gradient needs only x and the dx that the backward computes anyway:
  dR = x^T (dx R) = (x^T dx) R. For the Cayley map the last R cancels (see `_Map`), so layers hand back x^T dx as it is.
- Layers of equal block size are mapped in one batch before the model's forward (`batch_rotations`). What was mapped lives in
  a `_Slot`, which copies and pickles as empty.
- Factors are the change R - I, not R: rounded to bf16 they keep their relative accuracy, and a new adapter adds exact zeros.
"""

import math
import sys
import warnings
import weakref
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from torch.utils.checkpoint import CheckpointFunction

from vlftlib.orthogonal import cayley_inverse, full_precision, householder, pack_skew, unpack_skew

# CPU libraries walk a token-long product with strides of a page badly: in parts it is 1.3 times as fast in float32 and 4 to 20
# times in bf16. Accelerators take one launch.
TOKENS_AT_ONCE = 512


class OFTLinear(nn.Module):
    """A frozen linear layer whose input features are rotated: y = s W (x R) + b.

    OFT (Qiu et al. 2023) in its input-side form, R block-diagonal by the Cayley map (OFTv2, Qiu et al. 2025) or a product of
    Householder reflections (HRA, Yuan et al. 2024). R = (I + Q)(I - Q)^-1; merged, the weight is s W R^T. The start is I.

    Args:
        base_layer: the layer to adapt; its parameters are frozen. Weights in 4 bits (either side) or 8 bits (input side) by
            bitsandbytes are dequantised per call and never saved for the backward.
        block_size: features per block, for "cayley"; divides in_features.
        num_reflections: reflections, even, for "householder".
        parametrization: "cayley" or "householder".
        dropout: probability, in training, that a block is replaced by the identity (Householder has one block).
        scale: whether to learn s, which starts at 1. R is then no longer the whole change: s W R^T is no pure rotation.

    Attributes:
        oft_R: float32 parameter. Cayley: (in_features / block_size, block_size (block_size - 1) / 2), the strict upper
            triangles of Q row by row. Householder: (in_features, num_reflections), the vectors.
        oft_scale: float32 scalar parameter or None; layers may share one.
        merged: whether the rotation is in the base layer's weight at present.

    Raises:
        TypeError: base_layer is no linear layer, or its weight is quantised in an unknown way.
        ValueError: the block size doesn't divide in_features (valid sizes are named), or an option is out of range.
    """

    def __init__(
        self,
        base_layer: nn.Linear,
        *,
        block_size: int | None = None,
        num_reflections: int | None = None,
        parametrization: Literal["cayley", "householder"] = "cayley",
        dropout: float = 0.0,
        scale: bool = False,
    ):
        super().__init__()
        if not isinstance(base_layer, nn.Linear):
            raise TypeError(f"OFTLinear adapts an nn.Linear, got {type(base_layer).__name__}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.quantization = _quantization(base_layer.weight)
        if self.quantization == "4-bit":
            base_layer.state_dict()  # undoes the repacking that bitsandbytes did if the layer ran on a CPU before
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        shape = _parameter_shape(self.in_features, parametrization, block_size, num_reflections)
        self.parametrization = parametrization
        self.block_size = block_size if parametrization == "cayley" else self.in_features
        self.num_blocks = self.in_features // self.block_size
        self.dropout = dropout
        self.merged = False
        self.base_layer = base_layer.requires_grad_(False)
        device = base_layer.weight.device
        self.oft_R = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=device))
        self.register_parameter("oft_scale", nn.Parameter(torch.ones((), device=device)) if scale else None)
        self._slot = _Slot()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the identity: Q = 0, or pairs of equal random vectors, whose reflections cancel but have gradients."""
        with torch.no_grad():
            if self.parametrization == "cayley":
                self.oft_R.zero_()
            else:
                half = torch.randn_like(self.oft_R[:, ::2]) / math.sqrt(self.in_features)
                self.oft_R.copy_(half.repeat_interleave(2, dim=1))
            if self.oft_scale is not None:
                self.oft_scale.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return self.base_layer(x)
        dtype, given = self._compute_dtype(x), x.dtype
        factors = self._slot.factors if self._slot.open else None
        if factors is None or factors[0].dtype != dtype:  # called outside its root's forward, or in a dtype unlike last time
            factors = _map_alone(self, dtype)
        if factors[0].requires_grad and not torch.is_grad_enabled():
            _refuse_reentrant_checkpointing()
        if self.dropout and self.training:
            blocks = (self.num_blocks, 1, 1) if self.parametrization == "cayley" else ()
            keep = (torch.rand(blocks, device=x.device) >= self.dropout).to(dtype)
            factors = (factors[0] * keep, *factors[1:])
        x = x.to(dtype)
        if self.quantization == "8-bit" or x.numel() <= self.in_features * self.out_features:
            rotated = _RotateInput.apply(x, self.oft_scale, *factors)
            return _base_forward(rotated, self.base_layer, self.quantization).to(given if self.quantization else dtype)
        bias = self.base_layer.bias
        bias = bias if bias is None else bias.to(dtype)
        y = _LinearOfRotatedWeight.apply(x, self.base_layer.weight, bias, self.oft_scale, *factors)
        return y.to(given) if self.quantization else y

    def _compute_dtype(self, x: Tensor) -> torch.dtype:
        if torch.is_autocast_enabled(x.device.type):
            return torch.get_autocast_dtype(x.device.type)
        if self.quantization:
            return getattr(self.base_layer, "compute_dtype", None) or x.dtype
        return self.base_layer.weight.dtype

    @torch.no_grad()
    def rotation(self) -> Tensor | tuple[Tensor, Tensor]:
        """The mapped rotation in float32, without gradient or dropout.

        Returns:
            Cayley: R, (num_blocks, block_size, block_size). Householder: (P, U) of R = I - P U^T, each
            (in_features, num_reflections).
        """
        dtype = _wide(self.oft_R.dtype)
        factors = _map([self], dtype)[0]
        if self.parametrization == "householder":
            return factors
        return factors[0] + torch.eye(self.block_size, dtype=dtype, device=self.oft_R.device)

    def merge(self) -> None:
        """Write s W R^T into the base layer, block by block in float32.

        Raises:
            RuntimeError: merged already.
            TypeError: the base weight is quantised.
        """
        self._rewrite_weight(merging=True)

    def unmerge(self) -> None:
        """Take the rotation out of the base layer again by its transpose; in 16-bit weights both leave their rounding.

        Raises:
            RuntimeError: not merged.
        """
        self._rewrite_weight(merging=False)

    @torch.no_grad()
    def _rewrite_weight(self, merging: bool) -> None:
        if self.quantization:
            raise TypeError(
                f"cannot merge into a {self.quantization} weight without loss: load the base model in full precision, load the "
                f"adapter onto it and merge there"
            )
        if self.merged == merging:
            raise RuntimeError("the adapter is merged already" if merging else "the adapter is not merged")
        weight = self.base_layer.weight
        scale = 1.0 if self.oft_scale is None else self.oft_scale.item()
        scale = scale if merging else 1 / scale
        rotation = self.rotation()
        with full_precision(weight.device):
            if self.parametrization == "cayley":
                for block, columns in zip(rotation, weight.split(self.block_size, dim=1)):
                    wide = columns.to(_wide(weight.dtype))
                    columns.copy_(wide @ (scale * (block.mT if merging else block)).to(wide.dtype))
            else:
                wide = weight.to(_wide(weight.dtype))
                left, right = (factor.to(wide.dtype) for factor in (rotation[::-1] if merging else rotation))
                weight.copy_(torch.addmm(wide, wide @ left, right.mT, alpha=-1).mul_(scale))
        self.merged = merging

    def extra_repr(self) -> str:
        blocks, scaled = self.parametrization == "cayley", self.oft_scale is not None
        size = f"block_size={self.block_size}" if blocks else f"num_reflections={self.oft_R.shape[1]}"
        return f"{self.parametrization}, {size}, dropout={self.dropout}, scale={scaled}, merged={self.merged}"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _quantization(weight: Tensor) -> str | None:
    kind = {"Params4bit": "4-bit", "Int8Params": "8-bit"}.get(type(weight).__name__)
    if kind is None and not weight.is_floating_point():
        raise TypeError(f"OFT works on floating-point weights and on bitsandbytes' 4 and 8 bits, not on {weight.dtype}")
    return kind


def _parameter_shape(in_features: int, parametrization: str, block_size: int | None, num_reflections: int | None):
    if parametrization == "cayley":
        if block_size is None or num_reflections is not None:
            raise ValueError(f"cayley takes block_size and no num_reflections, got {block_size} and {num_reflections}")
        if block_size < 2 or in_features % block_size:
            valid = [size for size in range(2, in_features + 1) if in_features % size == 0]
            nearest = sorted(sorted(valid, key=lambda size: abs(math.log(size / max(block_size, 1))))[:6])
            raise ValueError(
                f"block_size {block_size} does not divide {in_features} input features; nearest valid sizes: {nearest}"
            )
        return in_features // block_size, block_size * (block_size - 1) // 2
    if parametrization == "householder":
        if num_reflections is None or block_size is not None:
            raise ValueError(f"householder takes num_reflections and no block_size, got {num_reflections} and {block_size}")
        if num_reflections < 2 or num_reflections % 2 or num_reflections > in_features:
            raise ValueError(f"num_reflections must be even and from 2 to {in_features} (in_features), got {num_reflections}")
        return in_features, num_reflections
    raise ValueError(f'parametrization must be "cayley" or "householder", got {parametrization!r}')


# ---- one layer: rotate the rows of a matrix, and the gradients that follow -------------------------------------------


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
    total = x.new_zeros(dx.shape[0], dx.shape[2], dx.shape[2], dtype=_wide(x.dtype))
    for some_x, some_dx in zip(x.split(TOKENS_AT_ONCE, dim=2), dx.split(TOKENS_AT_ONCE, dim=1)):
        total += torch.bmm(some_x, some_dx)
    return total


def _gradients(x: Tensor, dx: Tensor, scale: Tensor | None, factors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of the scale and the factors from the layer's input and its gradient, for orthogonal R.

    Blocks: x^T dx, which `_Map` expects in place of dR = (x^T dx) R. Householder, with dR = x^T dx R: dP = -dR U and
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


class _RotateInput(torch.autograd.Function):
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


class _LinearOfRotatedWeight(torch.autograd.Function):
    """y = x (s W R^T)^T + b, saving x, W and the factors only: the rotated weight is computed again in the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, scale, *factors):
        ctx.quant_state = getattr(weight, "quant_state", None)
        ctx.save_for_backward(x, weight, scale, *factors)
        rotated = _rotated_weight(weight, ctx.quant_state, x.dtype, scale, factors)
        with torch.autocast(x.device.type, enabled=False):
            return linear(x, rotated, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale, *factors = ctx.saved_tensors
        rotated = _rotated_weight(weight, ctx.quant_state, x.dtype, scale, factors)
        dx = grad @ rotated
        return dx if ctx.needs_input_grad[0] else None, None, None, *_gradients(x, dx, scale, factors)


def _rotated_weight(weight: Tensor, quant_state, dtype: torch.dtype, scale: Tensor | None, factors) -> Tensor:
    with torch.autocast(weight.device.type, enabled=False):
        if quant_state is not None:
            from bitsandbytes.functional import dequantize_4bit

            weight = dequantize_4bit(weight, quant_state)
        rotated = _rotate(weight.to(dtype), factors, transpose=True)
        return rotated if scale is None else rotated.mul_(scale)


def _base_forward(x: Tensor, layer: nn.Linear, quantization: str | None) -> Tensor:
    """The frozen layer on an input in its dtype; none of the three saves a tensor of token size."""
    if quantization == "8-bit":
        return layer(x)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    if quantization == "4-bit":
        # not the layer itself: on CPUs its inference repacks the weight, which from then on dequantises to noise
        from bitsandbytes import matmul_4bit

        return matmul_4bit(x, layer.weight, bias=bias, quant_state=layer.weight.quant_state)
    return linear(x, layer.weight.to(x.dtype), bias)


# ---- all layers of a model: one map a forward ------------------------------------------------------------------------


class _NormBound:
    """A number on the host that is not below the largest |Q|^2, without waiting for the device.

    On an accelerator each map sends its norm to pinned memory and the next map, one optimizer step later, reads what has
    arrived (not-a-number: not yet) with a margin for what that step may add. Only the first map waits.
    """

    def __init__(self):
        self.arriving: Tensor | None = None
        self.norm = self.granted = 0.0
        self.age = 0

    def __call__(self, bound: Tensor) -> float:
        largest = bound.amax().sqrt()
        if largest.device.type == "cpu":
            return largest.item() ** 2
        if self.arriving is None:
            self.norm, self.age = largest.item(), 0
            self.arriving = torch.empty((), dtype=largest.dtype, pin_memory=True)
            self._send(largest)
            self.granted = self.norm
            return self.norm**2
        arrived = self.arriving.item()
        if math.isnan(arrived):
            self.age += 1
        else:
            if arrived > self.granted:
                warnings.warn(
                    f"OFT parameters jumped to a norm of {arrived:.2g} where at most {self.granted:.2g} was expected, so the "
                    f"last forward's rotations had not converged; call batch_rotations(model) after changing them by hand",
                    stacklevel=2,
                )
            self.norm, self.age = arrived, 1
            self._send(largest)
        self.granted = 2**self.age * self.norm + self.age
        return self.granted**2

    def _send(self, largest: Tensor) -> None:
        self.arriving.fill_(math.nan)
        self.arriving.copy_(largest, non_blocking=True)


class _Slot:
    """What was mapped for one layer. It copies and pickles as empty, since a mapped rotation belongs to one graph."""

    def __init__(self):
        self.factors: tuple[Tensor, ...] | None = None
        self.open = False  # the root's forward is under way: the factors are current
        self.dtype: torch.dtype | None = None  # in which the layer last computed
        self.state = None  # of the parameter that factors without gradient were mapped from
        self.norm_bound = _NormBound()

    def __deepcopy__(self, memo):
        return _Slot()

    def __reduce__(self):
        return _Slot, ()


class _Map(torch.autograd.Function):
    """Packed Q of many blocks to R - I = 2 (M - I), with M = (I - Q)^-1.

    With O = x^T dx, dR = O R; and R M^T = M, so dQ = 2 M^T dR M^T = 2 M^T O M: layers pass O as the gradient of their factors.
    """

    @staticmethod
    def forward(ctx, packed, block_size, dtype, norm_bound):
        with full_precision(packed.device):
            inverse = cayley_inverse(unpack_skew(packed.to(_wide(packed.dtype)), block_size), norm_bound)
            inverse.diagonal(dim1=1, dim2=2).sub_(1)
            change = inverse.mul_(2).to(dtype)
        ctx.save_for_backward(change)  # the storage that the layers save: one matrix a block in all
        ctx.packed_dtype = packed.dtype
        return change

    @staticmethod
    @once_differentiable
    def backward(ctx, outer):
        (change,) = ctx.saved_tensors
        with full_precision(change.device):
            inverse = change.to(_wide(ctx.packed_dtype)) / 2
            inverse.diagonal(dim1=1, dim2=2).add_(1)
            outer = outer.to(inverse.dtype)
            grad = inverse.mT @ (outer - outer.mT) @ inverse
        return pack_skew(grad).mul_(2).to(ctx.packed_dtype), None, None, None


class _Join(torch.autograd.Function):
    """Parameters of several layers to one tensor; layers that no gradient came back for get None, not zeros (see `_Split`)."""

    @staticmethod
    def forward(ctx, absent, *parameters):
        ctx.absent, ctx.sizes = absent, [len(parameter) for parameter in parameters]
        return torch.cat(parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return None, *(None if index in ctx.absent else part for index, part in enumerate(grad.split(ctx.sizes)))


class _Split(torch.autograd.Function):
    """One tensor to parts by rows; notes in `absent` the parts that took part in no loss."""

    @staticmethod
    def forward(ctx, absent, sizes, joined):
        ctx.absent, ctx.sizes, ctx.shape = absent, sizes, joined.shape
        ctx.set_materialize_grads(False)
        return joined.split(sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        ctx.absent.clear()
        ctx.absent.update(index for index, grad in enumerate(grads) if grad is None)
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None, None
        parts = (given.new_zeros(size, *ctx.shape[1:]) if grad is None else grad for size, grad in zip(ctx.sizes, grads))
        return None, None, torch.cat(list(parts))


def _map(layers: list[OFTLinear], dtype: torch.dtype, norm_bound: _NormBound | None = None) -> list[tuple[Tensor, ...]]:
    """Factors of layers of equal block size (Householder: of equal shape), in one batch."""
    absent: set[int] = set()
    joined = _Join.apply(absent, *(layer.oft_R for layer in layers))
    if layers[0].parametrization == "cayley":
        change = _Map.apply(joined, layers[0].block_size, dtype, norm_bound)
        return [(part,) for part in _Split.apply(absent, [layer.num_blocks for layer in layers], change)]
    rows = [layer.in_features for layer in layers]
    factors = householder(joined.unflatten(0, (len(layers), -1)))
    left, right = (_Split.apply(absent, rows, factor.flatten(0, 1).to(dtype)) for factor in factors)
    return list(zip(left, right))


def _fill(layers: list[OFTLinear], dtype: torch.dtype, norm_bound: _NormBound, keep: bool) -> None:
    """Map layers of one group into their slots; without gradients, and if `keep`, only where a parameter has changed.

    A forward that builds a graph always maps, and so renews what is kept: fused optimizers may write past torch's version
    counters. The map's own saved tensors stay out of sight of checkpointing, whose second pass finds the factors ready.
    """
    grad = torch.is_grad_enabled()
    trained = grad and any(layer.oft_R.requires_grad for layer in layers)
    states = [(layer.oft_R._version, layer.oft_R.data_ptr(), dtype) for layer in layers] if keep and not trained else None
    if states and all(layer._slot.state == state for layer, state in zip(layers, states)):
        return
    with torch.inference_mode(False), torch.set_grad_enabled(grad), torch.autograd.graph.saved_tensors_hooks(_same, _same):
        mapped = _map(layers, dtype, norm_bound)
    for index, (layer, factors) in enumerate(zip(layers, mapped)):
        layer._slot.factors = factors
        layer._slot.state = states[index] if states else None


def _same(tensor: Tensor) -> Tensor:
    return tensor


@torch.compiler.disable
def _map_alone(layer: OFTLinear, dtype: torch.dtype) -> tuple[Tensor, ...]:
    slot = layer._slot
    slot.dtype = dtype  # the next batch maps to it at once
    in_backward = torch._C._current_graph_task_id() != -1
    if in_backward and slot.factors is not None and slot.factors[0].dtype == dtype:  # checkpointing's second pass
        if slot.factors[0].requires_grad or not layer.oft_R.requires_grad:
            return slot.factors
    _fill([layer], dtype, slot.norm_bound, keep=not isinstance(layer.oft_R, DTensor))
    return slot.factors


@torch.compiler.disable
def _refuse_reentrant_checkpointing() -> None:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise RuntimeError(
                "OFT maps a model's rotations once, outside of checkpointed parts, which reentrant checkpointing cannot reach: "
                'use gradient_checkpointing_enable({"use_reentrant": False}) or checkpoint(..., use_reentrant=False)'
            )
        frame = frame.f_back


class _Plan:
    """The OFT layers under one root and the norm bounds of their groups."""

    def __init__(self, root: nn.Module):
        self.layers = [module for module in root.modules() if isinstance(module, OFTLinear)]
        self.units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self.norm_bounds: dict[tuple, _NormBound] = {}
        self.opened: list[OFTLinear] = []


_PLANS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by root; a copied or unpickled root starts a new one


def batch_rotations(model: nn.Module) -> None:
    """Let all OFT layers of a model share one map a forward, in one batch for each block size.

    Layers map for themselves when called outside the model's own call. Under `fully_shard` each wrapped unit maps what it
    holds. Call it again after adding or removing layers, or after changing parameters by hand.

    Args:
        model: the module whose call starts a forward.
    """
    _PLANS.pop(model, None)
    if _before_forward not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_before_forward)
        model.register_forward_hook(_after_forward, always_call=True)


@torch.compiler.disable
def _before_forward(root: nn.Module, args) -> None:
    plan = _PLANS.get(root)
    if plan is None or (not plan.units and any(isinstance(layer.oft_R, DTensor) for layer in plan.layers)):
        plan = _PLANS[root] = _Plan(root)
        for unit in plan.units:  # their parameters are whole only inside their own forward
            if unit is not root:
                batch_rotations(unit)
    plan.opened = [layer for layer in plan.layers if not (layer.merged or layer._slot.open or isinstance(layer.oft_R, DTensor))]
    groups: dict[tuple, list[OFTLinear]] = {}
    for layer in plan.opened:
        size = layer.block_size if layer.parametrization == "cayley" else layer.oft_R.shape
        dtype = layer._slot.dtype or layer._compute_dtype(layer.oft_R)
        groups.setdefault((size, dtype, layer.oft_R.device), []).append(layer)
    for key, layers in groups.items():
        # fully_shard fills parameters behind their version counters, so nothing is kept there
        _fill(layers, key[1], plan.norm_bounds.setdefault(key, _NormBound()), keep=not plan.units)
    for layer in plan.opened:
        layer._slot.open = True


@torch.compiler.disable
def _after_forward(root: nn.Module, args, output) -> None:
    plan = _PLANS[root]
    for layer in plan.opened:
        layer._slot.open = False
    plan.opened = []
