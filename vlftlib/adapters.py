"""A model's adapters: put on by recipe, staged, counted, saved, loaded, merged. What a user calls is here.

The parts: `scopes` (which modules), `attach` (LoRA and OFT on them), `counting`, `saving` over `peft_files`, `merging`.
"""

from torch import nn

from vlftlib.attach import AdapterParameter, adapted_modules, adapter_parameters, apply_lora, apply_oft
from vlftlib.counting import ParameterCount, count_parameters, count_recipe
from vlftlib.merging import MergeCheck, check_merge, merge_adapters, unmerge_adapters
from vlftlib.recipes import Recipe, Stage
from vlftlib.saving import load_adapters, save_adapters
from vlftlib.scopes import SCOPES, select_modules, vision_block_of, words_of

__all__ = [
    "SCOPES",
    "AdapterParameter",
    "MergeCheck",
    "ParameterCount",
    "adapted_modules",
    "adapter_parameters",
    "apply_lora",
    "apply_oft",
    "apply_recipe",
    "check_merge",
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
