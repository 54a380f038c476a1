"""A model's adapters: put on by recipe, staged, counted, saved, loaded, merged. What a user calls is here.

The parts: `scopes` (which modules), `attach` (LoRA and OFT on them), `counting`, `saving` over `peft_files`.
"""

from peft.tuners.lora import LoraLayer
from torch import nn

from vlftlib.attach import AdapterParameter, adapted_modules, adapter_parameters, apply_lora, apply_oft, some
from vlftlib.counting import ParameterCount, count_parameters, count_recipe
from vlftlib.mapping import batch_rotations
from vlftlib.oft import OFTLinear
from vlftlib.recipes import Recipe, Stage
from vlftlib.saving import load_adapters, save_adapters
from vlftlib.scopes import SCOPES, select_modules, vision_block_of, words_of

__all__ = [
    "SCOPES",
    "AdapterParameter",
    "ParameterCount",
    "adapted_modules",
    "adapter_parameters",
    "apply_lora",
    "apply_oft",
    "apply_recipe",
    "count_parameters",
    "count_recipe",
    "load_adapters",
    "merge_adapters",
    "save_adapters",
    "select_modules",
    "stage_parameters",
    "trained_in",
    "unmerge_adapters",
]


def apply_recipe(model: nn.Module, recipe: Recipe, *, max_dropout: float | None = None, seed: int = 0) -> nn.Module:
    """Put a recipe's adapters on a model, in place, after checking all of them.

    Args:
        max_dropout: a larger LoRA dropout is cut to this; None leaves the recipe's.
        seed: as in `apply_lora`.

    Returns:
        The model, all but its adapters frozen.

    Raises:
        ValueError: as `apply_lora` and `apply_oft`; then the model is unchanged.
    """
    count_recipe(model, recipe)
    for adapter in recipe.adapters:
        settings = dict(vars(adapter))
        if max_dropout is not None and adapter.method == "lora":
            settings["dropout"] = min(adapter.dropout, max_dropout)
        {"lora": apply_lora, "oft": apply_oft}[adapter.method](model, **settings, seed=seed)
    return model


def stage_parameters(model: nn.Module, stage: Stage, frozen_blocks: int = 0) -> list[AdapterParameter]:
    """Let a stage's adapters train and freeze the others; arguments, result and errors as `trained_in`."""
    train = trained_in(model, stage, frozen_blocks)
    names = {item.name for item in train}
    for item in adapter_parameters(model):
        item.parameter.requires_grad_(item.name in names)
    return train


def trained_in(model: nn.Module, stage: Stage, frozen_blocks: int = 0) -> list[AdapterParameter]:
    """A stage's adapters.

    Args:
        frozen_blocks: without those on so many of the vision tower's first blocks.

    Raises:
        ValueError: one of the stage's words means no adapter of the model, or all that it means are in frozen blocks.
    """
    items = adapter_parameters(model)
    words = {item.path: {item.method, *words_of(item.path)} for item in items}
    if lacking := set(stage.train).difference(*words.values()):
        raise ValueError(f"stage trains {', '.join(stage.train)}: the model has no {', '.join(sorted(lacking))} adapters")
    train = [item for item in items if not words[item.path].isdisjoint(stage.train)]
    frozen = {item.path for item in train if (block := vision_block_of(item.path)) is not None and block < frozen_blocks}
    if all(item.path in frozen for item in train):
        raise ValueError(f"stage trains {', '.join(stage.train)}: all of it is in the first {frozen_blocks} blocks, frozen")
    # A tower's scale counts as its first module's, and the blocks that train have it too.
    return [item for item in train if item.path not in frozen or item.name.endswith(".oft_scale")]


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
