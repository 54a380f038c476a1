"""The three reports' configurations by name, as data; `adapters.apply_recipe` puts one on a model.

What a report leaves open is listed in `Recipe.chosen`: that value is ours. Platform adaptions (dropout, precision) are
not here but in the device's policy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from vlftlib.recipe_parts import (
    ADAPTER_RULES,
    OFT,
    SCHEDULER,
    TOWER_RULES,
    LoRA,
    Stage,
    above_zero,
    all_of,
    check_towers,
    check_value,
    integer,
    means,
    number,
    one_of,
    read_stages,
)


@dataclass(frozen=True)
class Recipe:
    """A report's configuration: adapters, stages, training settings.

    `towers` holds what differs from the recipe's own AdamW settings, by tower ("vision", "text") or scope, as
    {"vision.merger": {"learning_rate": 2e-4}}; for each setting the longest word that means a tensor's module wins.
    `precision` None leaves it to the platform. `overrides` is what the caller changed.

    Raises:
        ValueError: stages that don't add up, an adapter that never trains, or a word that means no adapter of the recipe.
    """

    name: str
    report: str
    summary: str
    adapters: tuple[LoRA | OFT, ...]
    learning_rate: float
    chosen: tuple[str, ...]
    stages: tuple[Stage, ...] = ()
    towers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    scheduler: str = "cosine"
    warmup_ratio: float = 0.03
    batch_size: int = 8
    gradient_accumulation_steps: int = 4
    num_epochs: float = 3
    max_grad_norm: float = 1.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = 0.0
    precision: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not self.stages:
            object.__setattr__(self, "stages", (Stage(tuple(sorted({adapter.method for adapter in self.adapters}))),))
        for problem in (*self._word_problems(), *self._length_problems()):
            raise ValueError(f"recipe {self.name}: {problem}")

    def _word_problems(self):
        there = ", ".join(f"{adapter.method} on {', '.join(adapter.scope)}" for adapter in self.adapters)
        in_blocks = any(_in_vision_blocks(adapter) for adapter in self.adapters)
        for place, stage in enumerate(self.stages, 1):
            for word in stage.train:
                if not any(means(word, adapter) for adapter in self.adapters):
                    yield f"stage {place} trains {stage.train}, and {word!r} means none of its adapters: {there}"
            if stage.frozen_blocks and not in_blocks:
                yield f"stage {place} freezes {stage.frozen_blocks} vision blocks, and none has an adapter: {there}"
            if stage.learning_rate is not None and not self.learning_rate:
                yield f"stage {place} has learning_rate {stage.learning_rate}, which has no ratio to the recipe's, 0"
        for adapter in self.adapters:
            if not any(means(word, adapter) for stage in self.stages for word in stage.train):
                yield f"no stage trains {adapter.method} on {', '.join(adapter.scope)}"
        check_towers(self.towers)
        for word in self.towers:
            if not any(means(word, adapter) for adapter in self.adapters):
                yield f"towers has {word!r}, which means none of its adapters: {there}"

    def _length_problems(self):
        lengths = [(stage.share, stage.epochs, stage.steps) for stage in self.stages]
        rest, in_steps = lengths.count((None, None, None)), sum(stage.steps is not None for stage in self.stages)
        if in_steps == len(lengths):
            return
        if rest > 1:
            yield f"{rest} stages have no length: only one can take the rest"
        if in_steps and not rest:
            yield "some stages' lengths are in steps, others not: then one stage must have no length and take the rest"
        known = sum(stage.share or (stage.epochs or 0) / self.num_epochs for stage in self.stages)
        whole, shown = math.isclose(known, 1), f"its stages' shares and epochs (of {self.num_epochs}) make {known:.3g} of the run"
        if rest and (known > 1 or whole):
            yield f"{shown}: nothing is left for the stage without a length"
        if not rest and not whole:
            yield f"{shown}: 1 is right, or one stage without a length, which takes the rest"


def _in_vision_blocks(adapter: LoRA | OFT) -> bool:
    return any(scope.startswith(("vision.attention", "vision.mlp")) for scope in adapter.scope)


_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="lora_text",
            report="Report A, first attempt",
            summary="LoRA on the text model's attention; the vision tower stays as it is",
            adapters=(LoRA(("text.attention",), r=32, alpha=64, dropout=0.05),),
            learning_rate=2e-4,
            chosen=("dropout", "warmup_ratio", "max_grad_norm", "adam_beta2", "weight_decay"),
        ),
        Recipe(
            name="lora_text_vision",
            report="Report A, final",
            summary="LoRA on the text model's attention and on that of the vision tower's last six blocks",
            adapters=(
                LoRA(("text.attention",), r=32, alpha=64, dropout=0.05),
                LoRA(("vision.attention",), r=32, alpha=64, dropout=0.05, last_n_blocks=6),
            ),
            learning_rate=2e-4,
            chosen=("dropout", "warmup_ratio", "max_grad_norm", "adam_beta2", "weight_decay"),
        ),
        # Report C gives no rate for the merger, only that it is a separate one; to have one, the merger gets adapters.
        Recipe(
            name="lora_dual",
            report="Report C, LoRA",
            summary="LoRA on both towers' attention and the merger, stronger in vision; a rate of its own for the merger",
            adapters=(
                LoRA(("vision.attention", "vision.merger"), r=8, alpha=32, dropout=0.1),
                LoRA(("text.attention",), r=8, alpha=16, dropout=0.05),
            ),
            learning_rate=1e-4,
            towers={"vision.merger": {"learning_rate": 2e-4}},
            adam_beta2=0.95,
            chosen=(
                "learning_rate",
                "towers",
                "scheduler",
                "warmup_ratio",
                "batch_size",
                "gradient_accumulation_steps",
                "num_epochs",
                "weight_decay",
            ),
        ),
        Recipe(
            name="oft_vision",
            report="Report A, OFT",
            summary="OFT on the output projections of the vision tower's attention; text frozen",
            adapters=(OFT(("vision.attention.output",), block_size=64),),
            learning_rate=1e-4,
            chosen=("scheduler", "warmup_ratio", "max_grad_norm", "adam_beta2", "weight_decay"),
        ),
        # The vision MLP's down_proj has 3,420 inputs, which 64 does not divide. Report C freezes the first three vision layers
        # "early"; for how long is ours.
        Recipe(
            name="oft_dual",
            report="Report C, OFT",
            summary="block OFT on the vision MLPs, Householder OFT on the text model, a learnable scale for each",
            adapters=(
                OFT(("vision.mlp",), block_size={"gate_proj": 64, "up_proj": 64, "down_proj": 60}, scale=True),
                OFT(("text.attention",), parametrization="householder", num_reflections=8, scale=True),
            ),
            stages=(Stage(("oft",), frozen_blocks=3, frozen_share=0.25),),
            learning_rate=1e-4,
            adam_beta2=0.95,
            chosen=(
                "block_size",
                "num_reflections",
                "frozen_share",
                "learning_rate",
                "scheduler",
                "warmup_ratio",
                "batch_size",
                "gradient_accumulation_steps",
                "num_epochs",
                "weight_decay",
            ),
        ),
        # Report B writes its blocks' rotations as Householder products; a Cayley block reaches the same rotations.
        Recipe(
            name="hybrid_staged",
            report="Report B",
            summary="OFT on the merger alone for one epoch of three, then together with LoRA on the text model's attention",
            adapters=(
                OFT(("vision.merger",), block_size=256),
                LoRA(("text.attention",), r=16, alpha=32, dropout=0.05),
            ),
            stages=(Stage(("oft",), 1 / 3), Stage(("lora", "oft"), 2 / 3)),
            learning_rate=1e-4,
            batch_size=4,
            gradient_accumulation_steps=16,
            chosen=("parametrization", "max_grad_norm", "adam_beta2", "weight_decay"),
        ),
    )
}

RECIPES = tuple(_RECIPES)
# The recipes state what is right for the real models. The embedded base is a thousand times smaller: it takes larger steps,
# its down_proj has 256 inputs, which 60 does not divide, and of its 4 vision blocks one is enough to freeze. Rates were chosen on
# the validation pictures.
_TINY = dict(batch_size=32, gradient_accumulation_steps=1, num_epochs=5)
TINY_BASE_OVERRIDES = MappingProxyType(
    {
        "lora_text": dict(_TINY, learning_rate=1e-3),
        "lora_text_vision": dict(_TINY, learning_rate=1e-3),
        "lora_dual": dict(_TINY, learning_rate=1e-3, towers={"vision.merger": {"learning_rate": 2e-3}}),
        "oft_vision": dict(_TINY, learning_rate=5e-3),
        "oft_dual": dict(_TINY, learning_rate=5e-3, block_size=64, stages=(Stage(("oft",), frozen_blocks=1, frozen_share=0.25),)),
        "hybrid_staged": dict(_TINY, learning_rate=2e-3, stages=(Stage(("oft",), epochs=1), Stage(("lora", "oft")))),
    }
)


_TRAINING_RULES = TOWER_RULES | {
    "towers": ("a mapping", lambda value: True),  # checked with the recipe's adapters
    "scheduler": SCHEDULER,
    "warmup_ratio": number(0, 1),
    "batch_size": integer(1),
    "gradient_accumulation_steps": integer(1),
    "num_epochs": above_zero(),
    "max_grad_norm": number(0),
    "precision": one_of(None, "float32", "bf16", "fp16"),
    "adapters": all_of((LoRA, OFT), "LoRA and OFT"),
    "stages": all_of(Stage, "stages, as {'train': ['oft'], 'epochs': 1}"),
}


def _takes(adapter: LoRA | OFT, key: str) -> bool:
    """Whether an override of `key` means this adapter: it uses that field."""
    if key == "last_n_blocks":
        return _in_vision_blocks(adapter)
    return getattr(adapter, key, None) is not None


def get_recipe(name: str, **overrides) -> Recipe:
    """A report's configuration by name, with values changed by keyword.

    An adapter's field (`r`, `dropout`, `block_size`, ...) changes in every adapter of the recipe that uses it; `scope` only
    where there is one adapter; `adapters`, `stages` and `towers` are replaced whole. Stages may be plain mappings.

    Args:
        name: one of `RECIPES`.
        overrides: fields of `Recipe`, `LoRA` or `OFT`, as far as the recipe has them.

    Returns:
        A frozen `Recipe` that also names its overrides.

    Raises:
        ValueError: unknown recipe, a key that it doesn't have, or a value out of range; names what would be right.
    """
    if name not in _RECIPES:
        raise ValueError(f"unknown recipe {name!r}: there are {', '.join(RECIPES)}")
    recipe = _RECIPES[name]
    adapters = overrides.get("adapters", recipe.adapters)
    in_adapters = [key for key in ADAPTER_RULES if any(_takes(adapter, key) for adapter in adapters)]
    if len(adapters) > 1:
        in_adapters.remove("scope")
    valid = {key: _TRAINING_RULES.get(key) or ADAPTER_RULES[key] for key in (*in_adapters, *_TRAINING_RULES)}
    training = {}
    for key, value in overrides.items():
        if key not in valid:
            raise ValueError(f"recipe {name} has no {key!r}: it has {', '.join(valid)}")
        if key == "stages":
            value = read_stages(value)
        check_value(f"recipe {name}:", key, value, valid[key])
        if key in _TRAINING_RULES:
            training[key] = value
        else:
            value = (value,) if key == "scope" and isinstance(value, str) else value
            adapters = tuple(replace(a, **{key: value}) if _takes(a, key) else a for a in adapters)
    return replace(recipe, **training | {"adapters": adapters, "overrides": overrides})
