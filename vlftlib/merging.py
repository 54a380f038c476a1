"""Fold adapters into the base's weights, undo it, and check it.

How far merged logits may differ from the adapters' isn't a constant: it hangs on the dtype, the depth and the weights. So it is
measured on the model itself: what comes of moving every merged weight by a unit in its last place, or by 1e-6 of it in float32.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from vlftlib.attach import adapted_modules, some
from vlftlib.mapping import batch_rotations
from vlftlib.oft import OFTLinear

TOLERATED = 4  # times the effect of one such move; up to 2 was seen in any dtype and recipe
ROTATION_ERROR = 1e-6  # of a rotation in float32, which is more than float32's last place


@dataclass(frozen=True)
class MergeCheck:
    """Merged logits beside the adapters' on one batch.

    Attributes:
        difference: the largest between the two.
        bound: what rounding may cause.
        largest: the largest logit, in size.
    """

    difference: float
    bound: float
    largest: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.bound  # also where one isn't a number

    def __str__(self) -> str:
        verdict = "within rounding" if self.passed else "NOT within rounding"
        sizes = f"{verdict} ({self.bound:.2g}; logits to {self.largest:.3g})"
        return f"merged and adapter logits differ by at most {self.difference:.2g}, {sizes}"


def merge_adapters(model: nn.Module, *, remove: bool = False) -> nn.Module:
    """Fold all adapters into the base weights, in place: W + (alpha / r) B A, s W R^T; logits stay, up to rounding.

    Args:
        remove: replace the adapted layers by their merged base layers, for good; the model is then a stock one.

    Returns:
        The model.

    Raises:
        ValueError: no adapters, or merged already, or the base is quantised.
    """
    layers = _layers_to_merge(model, merged=False)
    for path, layer in layers.items():
        weight = layer.base_layer.weight
        if hasattr(weight, "quant_state") or not weight.is_floating_point():
            raise ValueError(f"{path} is quantised: load the base in full precision and merge into that")
    for path, layer in layers.items():
        layer.merge()
        if remove:
            model.set_submodule(path, layer.base_layer)
    if remove and any(isinstance(layer, OFTLinear) for layer in layers.values()):
        batch_rotations(model)  # or its plan would keep the removed layers
    return model


def unmerge_adapters(model: nn.Module) -> nn.Module:
    """Undo `merge_adapters`, in place; the base weights come back up to rounding.

    Raises:
        ValueError: no adapters, or not merged.
    """
    for layer in _layers_to_merge(model, merged=True).values():
        layer.unmerge()
    return model


def _layers_to_merge(model: nn.Module, merged: bool) -> dict[str, OFTLinear | LoraLayer]:
    layers = adapted_modules(model)
    if not layers:
        raise ValueError("the model has no adapters")
    if wrong := [path for path, layer in layers.items() if layer.merged != merged]:
        raise ValueError(f"adapters are {'not ' if merged else 'already '}merged on {some(wrong)}")
    return layers


def check_merge(model: nn.Module, batch: Mapping[str, Tensor]) -> MergeCheck:
    """Compare a model's logits with its adapters and with them merged; the model stays bit for bit as it is.

    Args:
        model: with adapters, not merged.
        batch: the model's inputs, as the collator or the processor gives them.

    Returns:
        The largest difference and what rounding may cause; it costs three forwards and a copy of the adapted weights.

    Raises:
        ValueError: as `merge_adapters`.
    """
    layers = _layers_to_merge(model, merged=False)
    kept = [(p, p.detach().clone()) for layer in layers.values() for p in layer.base_layer.parameters()]  # LoRA may have a bias
    mode = model.training
    model.eval()
    try:
        adapted = batch_logits(model, batch)
        merge_adapters(model)
        merged = batch_logits(model, batch)
        shake_weights(layer.base_layer.weight for layer in layers.values())
        return compare_logits(adapted, merged, merged, batch_logits(model, batch))
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)
            for layer in layers.values():
                if isinstance(layer, OFTLinear):
                    layer.merged = False
                else:
                    layer.merged_adapters.clear()
        model.train(mode)


@torch.no_grad()
def batch_logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    inputs = {name: value.to(model.device) for name, value in batch.items() if name not in ("row", "labels")}
    return model(**inputs).logits[inputs["attention_mask"].bool()].float().cpu()


@torch.no_grad()
def shake_weights(weights: Iterable[Tensor]) -> None:
    """Move every weight up or down by what its rounding may be, in place."""
    generator = torch.Generator().manual_seed(0)
    for weight in weights:
        signs = torch.randint(0, 2, weight.shape, dtype=torch.int8, generator=generator).mul_(2).sub_(1).to(weight.device)
        weight.addcmul_(weight, signs.to(weight.dtype), value=max(torch.finfo(weight.dtype).eps, ROTATION_ERROR))


def compare_logits(adapted: Tensor, merged: Tensor, still: Tensor, shaken: Tensor) -> MergeCheck:
    """Logits with adapters and merged; the bound comes from those before and after `shake_weights`."""
    bound = TOLERATED * (shaken - still).abs().max().item()
    return MergeCheck((merged - adapted).abs().max().item(), bound, adapted.abs().max().item())
