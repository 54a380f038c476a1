"""Orthogonal fine-tuning of a linear layer: y = s W (x R) + b with W frozen, R a trainable rotation, s an optional scale.

Either side is rotated: the weight (W R^T, cost independent of the batch) where tokens outnumber output features, else the
input; see `rotating`. The rotations of a model's layers are mapped in one batch; see `mapping`.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from vlftlib.mapping import Slot, map_alone, map_layers, parameters_were_loaded, refuse_reentrant_checkpointing
from vlftlib.orthogonal import full_precision
from vlftlib.rotating import LinearOfRotatedWeight, RotateInput, base_forward, rotate_by_any, wide

INSIDE = "an adapter can't be put inside another's base_layer (PEFT's target_modules must not reach it, as all-linear does)"
ROWS_AT_ONCE = 512  # of a weight that Householder reflections are merged into


class OFTLinear(nn.Module):
    """A frozen linear layer whose input features are rotated: y = s W (x R) + b.

    OFT (Qiu et al. 2023) in its input-side form, R block-diagonal by the Cayley map (OFTv2, Qiu et al. 2025) or a product of
    Householder reflections (HRA, Yuan et al. 2024). R = (I + Q)(I - Q)^-1; merged, the weight is s W R^T. The start is I.

    Args:
        base_layer: the layer to adapt; its parameters are frozen. Weights in 4 bits (either side) or 8 bits (input side) by
            bitsandbytes are dequantised per call and never saved for the backward.
        block_size: features per block, for "cayley"; divides in_features.
        num_reflections: reflections, even, for "householder".
        parametrization: "cayley" or "householder"; "cayley_neumann" only to read PEFT's files: a series in the place of the
            Cayley map, no rotation but for small Q (`orthogonal.cayley_neumann`), input side only, unmerged by solving.
        neumann_terms: PEFT's count of its terms, for "cayley_neumann".
        block_share: whether all blocks are one, for both Cayley maps; for PEFT's files too.
        dropout: probability, in training, that a block is replaced by the identity (Householder has one block).
        scale: whether to learn s, which starts at 1. R is then no longer the whole change: s W R^T is no pure rotation.

    Attributes:
        oft_R: float32 parameter. Cayley: (in_features / block_size, block_size (block_size - 1) / 2), the strict upper
            triangles of Q row by row, one row with block_share. Householder: (in_features, num_reflections), the vectors.
        oft_scale: float32 scalar parameter or None; layers may share one. One whose oft_R is frozen gives it no gradient, so
            that frozen layers below the first trained one need no backward.
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
        parametrization: Literal["cayley", "householder", "cayley_neumann"] = "cayley",
        neumann_terms: int | None = None,
        block_share: bool = False,
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
        if (neumann_terms is not None) != (parametrization == "cayley_neumann"):
            raise ValueError(f"neumann_terms is {neumann_terms}: cayley_neumann takes it, {parametrization} was asked for")
        if block_share and parametrization == "householder":
            raise ValueError("block_share is for blocks, and householder has one")
        self.parametrization, self.neumann_terms, self.block_share = parametrization, neumann_terms, block_share
        self.block_size = self.in_features if parametrization == "householder" else block_size
        self.num_blocks = self.in_features // self.block_size
        self.dropout = dropout
        self.merged = False
        self.base_layer = base_layer.requires_grad_(False)
        device = base_layer.weight.device
        self.oft_R = nn.Parameter(torch.zeros(1 if block_share else shape[0], shape[1], dtype=torch.float32, device=device))
        self.register_parameter("oft_scale", nn.Parameter(torch.ones((), device=device)) if scale else None)
        self.slot = Slot()
        self.register_load_state_dict_post_hook(parameters_were_loaded)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the identity: Q = 0, or pairs of equal random vectors, whose reflections cancel but have gradients."""
        with torch.no_grad():
            if self.parametrization != "householder":
                self.oft_R.zero_()
            else:
                half = torch.randn_like(self.oft_R[:, ::2]) / math.sqrt(self.in_features)
                self.oft_R.copy_(half.repeat_interleave(2, dim=1))
            if self.oft_scale is not None:
                self.oft_scale.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return self.base_layer(x)
        if not isinstance(self.base_layer, nn.Linear):
            raise TypeError(f"OFTLinear's base_layer is a {type(self.base_layer).__name__}, which would be left out: {INSIDE}")
        dtype, given = self._compute_dtype(x), x.dtype
        factors = self.slot.factors if self.slot.open else None
        if factors is None or factors[0].dtype != dtype:  # called outside its root's forward, or in a dtype unlike last time
            factors = map_alone(self, dtype)
        if factors[0].requires_grad and not torch.is_grad_enabled():
            refuse_reentrant_checkpointing()
        if self.dropout and self.training:
            blocks = () if self.parametrization == "householder" else (self.num_blocks, 1, 1)
            keep = (torch.rand(blocks, device=x.device) >= self.dropout).to(dtype)
            factors = (factors[0] * keep, *factors[1:])
        x = x.to(dtype)
        scale = self.oft_scale
        if scale is not None and not self.oft_R.requires_grad:
            scale = scale.detach()
        neumann = self.parametrization == "cayley_neumann"
        if neumann or self.quantization == "8-bit" or x.numel() <= self.in_features * self.out_features:
            rotated = rotate_by_any(x, scale, *factors) if neumann else RotateInput.apply(x, scale, *factors)
            return base_forward(rotated, self.base_layer, self.quantization).to(given if self.quantization else dtype)
        bias = self.base_layer.bias
        bias = bias if bias is None else bias.to(dtype)
        y = LinearOfRotatedWeight.apply(x, self.base_layer.weight, bias, scale, *factors)
        return y.to(given) if self.quantization else y

    @property
    def kind(self) -> tuple:
        """What layers that are mapped in one batch have in common."""
        size = self.oft_R.shape if self.parametrization == "householder" else self.block_size
        return self.parametrization, size, self.neumann_terms

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
        dtype = wide(self.oft_R.dtype)
        factors = map_layers([self], dtype)[0]
        if self.parametrization == "householder":
            return factors
        return factors[0] + torch.eye(self.block_size, dtype=dtype, device=self.oft_R.device)

    def merge(self) -> None:
        """Write s W R^T into the base layer, in float32, block by block or some rows at once.

        Raises:
            RuntimeError: merged already.
            TypeError: the base weight is quantised.
        """
        self._rewrite_weight(merging=True)

    def unmerge(self) -> None:
        """Take the rotation out of the base layer again by its transpose; in 16-bit weights both leave their rounding.

        What "cayley_neumann" gives is no rotation: its blocks are solved for.

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
            if self.parametrization != "householder":
                for block, columns in zip(rotation, weight.split(self.block_size, dim=1)):
                    exact = columns.to(wide(weight.dtype))
                    if merging or self.parametrization == "cayley":
                        columns.copy_(exact @ (scale * (block.mT if merging else block)).to(exact.dtype))
                    else:
                        columns.copy_(torch.linalg.solve(block.to(exact.dtype), scale * exact.mT).mT)
            else:
                left, right = (factor.to(wide(weight.dtype)) for factor in (rotation[::-1] if merging else rotation))
                for rows in weight.split(ROWS_AT_ONCE):
                    exact = rows.to(left.dtype)
                    rows.copy_(torch.addmm(exact, exact @ left, right.mT, alpha=-1).mul_(scale))
        self.merged = merging

    def extra_repr(self) -> str:
        blocks, scaled = self.parametrization != "householder", self.oft_scale is not None
        size = f"block_size={self.block_size}" if blocks else f"num_reflections={self.oft_R.shape[1]}"
        size += f", neumann_terms={self.neumann_terms}" * (self.neumann_terms is not None) + ", block_share" * self.block_share
        return f"{self.parametrization}, {size}, dropout={self.dropout}, scale={scaled}, merged={self.merged}"


def _quantization(weight: Tensor) -> str | None:
    kind = {"Params4bit": "4-bit", "Int8Params": "8-bit"}.get(type(weight).__name__)
    if kind is None and not weight.is_floating_point():
        raise TypeError(f"OFT works on floating-point weights and on bitsandbytes' 4 and 8 bits, not on {weight.dtype}")
    return kind


def _parameter_shape(in_features: int, parametrization: str, block_size: int | None, num_reflections: int | None):
    if parametrization in ("cayley", "cayley_neumann"):
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
