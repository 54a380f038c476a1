"""Count a model's parameters, and a recipe's before it is applied."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from vlftlib.attach import adapter_parameters, check_free, oft_sizes
from vlftlib.scopes import SCOPES, scope_of, select_modules, tower_of


@dataclass(frozen=True)
class ParameterCount:
    """A model's parameters: those trained, all (with the adapters'), and those trained by scope."""

    trainable: int
    total: int
    per_scope: Mapping[str, int]

    @property
    def share(self) -> float:
        """Trainable parameters as a fraction of all."""
        return self.trainable / self.total

    def __repr__(self) -> str:
        scopes = ", ".join(f"{scope} {count:,}" for scope, count in self.per_scope.items())
        return f"{self.trainable:,} of {self.total:,} parameters trained ({self.share:.2%}: {scopes or 'none'})"


def _size(parameter: Tensor) -> int:
    state = getattr(parameter, "quant_state", None)  # bitsandbytes packs two 4-bit values into a byte
    return math.prod(state.shape) if state is not None else parameter.numel()


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count a model's parameters, tied and shared ones once."""
    per_scope = dict.fromkeys((*SCOPES, "other"), 0)
    scopes = {id(item.parameter): item.scope for item in adapter_parameters(model)}
    for parameter in model.parameters():
        if parameter.requires_grad:
            per_scope[scopes.get(id(parameter), "other")] += _size(parameter)
    per_scope = {scope: count for scope, count in per_scope.items() if count}
    return ParameterCount(sum(per_scope.values()), sum(map(_size, model.parameters())), per_scope)


def lora_size(in_features: int, out_features: int, r: int) -> int:
    """LoRA's parameters on one module: r (in + out)."""
    return r * (in_features + out_features)


def oft_size(in_features: int, size: int, parametrization: str = "cayley") -> int:
    """OFT's parameters on one module: in/b blocks of b(b-1)/2 for Cayley of block size b, in * n for n reflections."""
    return in_features * size if parametrization == "householder" else in_features // size * (size * (size - 1) // 2)


def count_recipe(model: nn.Module, recipe) -> ParameterCount:
    """What `count_parameters` will say after `apply_recipe`, by formula, for a model without adapters (meta will do).

    Raises:
        ValueError: as `apply_recipe`.
    """
    per_scope, taken, scaled = dict.fromkeys((*SCOPES, "other"), 0), set(), set()
    for adapter in recipe.adapters:
        paths = select_modules(model, adapter.scope, adapter.last_n_blocks)
        check_free(model, paths)
        if twice := taken.intersection(paths):
            raise ValueError(f"recipe {recipe.name} puts two adapters on {min(twice)}: its scopes must not overlap")
        taken.update(paths)
        if adapter.method == "oft":
            sizes = oft_sizes(model, paths, adapter.block_size, adapter.parametrization, adapter.num_reflections)
        for path in paths:
            module = model.get_submodule(path)
            if adapter.method == "lora":
                count = lora_size(module.in_features, module.out_features, adapter.r)
            else:
                count = oft_size(module.in_features, sizes[path], adapter.parametrization)
                if adapter.scale and tower_of(path) not in scaled:
                    scaled.add(tower_of(path))
                    count += 1
            per_scope[scope_of(path)] += count
    per_scope = {scope: count for scope, count in per_scope.items() if count}
    trainable = sum(per_scope.values())
    return ParameterCount(trainable, trainable + sum(map(_size, model.parameters())), per_scope)
