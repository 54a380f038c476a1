"""The three reports' configurations by name, as data; `adapters.apply_recipe` puts one on a model.

What a report leaves open is listed in `Recipe.chosen`: that value is ours. Platform adaptions (dropout, precision) are
not here but in the device's policy. Field names of `LoRA` and `OFT` are the arguments of `apply_lora` and `apply_oft`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar


@dataclass(frozen=True)
class LoRA:
    """One group of LoRA adapters; see `adapters.apply_lora`."""

    method: ClassVar[str] = "lora"
    scope: tuple[str, ...]
    r: int
    alpha: float
    dropout: float = 0.0
    last_n_blocks: int | None = None


@dataclass(frozen=True)
class OFT:
    """One group of OFT adapters; see `adapters.apply_oft`."""

    method: ClassVar[str] = "oft"
    scope: tuple[str, ...]
    block_size: int | Mapping[str, int] | None = None
    parametrization: str = "cayley"
    num_reflections: int | None = None
    block_dropout: float = 0.0
    scale: bool = False
    last_n_blocks: int | None = None


@dataclass(frozen=True)
class Stage:
    """A part of the run: the methods ("lora", "oft") that train in it, and its share of the run's steps."""

    train: tuple[str, ...]
    share: float


@dataclass(frozen=True)
class Recipe:
    """A report's configuration: adapters, stages, training settings.

    `learning_rates` holds rates that differ from `learning_rate`, by tower ("vision", "text") or scope; the longest
    matching word wins. `precision` None leaves it to the platform. `overrides` is what the caller changed.
    """

    name: str
    report: str
    summary: str
    adapters: tuple[LoRA | OFT, ...]
    learning_rate: float
    chosen: tuple[str, ...]
    stages: tuple[Stage, ...] = ()
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    scheduler: str = "cosine"
    warmup_ratio: float = 0.03
    batch_size: int = 8
    gradient_accumulation_steps: int = 4
    num_epochs: float = 3
    max_grad_norm: float = 1.0
    adam_beta2: float = 0.999
    weight_decay: float = 0.0
    precision: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        methods = tuple(sorted({adapter.method for adapter in self.adapters}))
        if not self.stages:
            object.__setattr__(self, "stages", (Stage(methods, 1.0),))
        for stage in self.stages:
            if not stage.train or not set(stage.train) <= set(methods):
                raise ValueError(f"recipe {self.name}: a stage trains {stage.train}, the recipe's methods are {methods}")
        shares = [stage.share for stage in self.stages]
        if min(shares) <= 0 or not math.isclose(sum(shares), 1):
            raise ValueError(f"recipe {self.name}: the stages' shares are {shares}; they must be positive and sum to 1")


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
            learning_rates={"vision.merger": 2e-4},
            adam_beta2=0.95,
            chosen=(
                "learning_rate",
                "learning_rates",
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
        # The vision MLP's down_proj has 3,420 inputs, which 64 does not divide.
        Recipe(
            name="oft_dual",
            report="Report C, OFT",
            summary="block OFT on the vision MLPs, Householder OFT on the text model, a learnable scale for each",
            adapters=(
                OFT(("vision.mlp",), block_size={"gate_proj": 64, "up_proj": 64, "down_proj": 60}, scale=True),
                OFT(("text.attention",), parametrization="householder", num_reflections=8, scale=True),
            ),
            learning_rate=1e-4,
            adam_beta2=0.95,
            chosen=(
                "block_size",
                "num_reflections",
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
# and its down_proj has 256 inputs, which 60 does not divide. Rates were chosen on the validation pictures.
_TINY = dict(batch_size=32, gradient_accumulation_steps=1, num_epochs=5)
TINY_BASE_OVERRIDES = MappingProxyType(
    {
        "lora_text": dict(_TINY, learning_rate=1e-3),
        "lora_text_vision": dict(_TINY, learning_rate=1e-3),
        "lora_dual": dict(_TINY, learning_rate=1e-3, learning_rates={"vision.merger": 2e-3}),
        "oft_vision": dict(_TINY, learning_rate=5e-3),
        "oft_dual": dict(_TINY, learning_rate=5e-3, block_size=64),
        "hybrid_staged": dict(_TINY, learning_rate=2e-3),
    }
)


def _integer(least: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer of at least {least}", lambda value: type(value) is int and value >= least


def _number(low: float, high: float) -> tuple[str, Callable[[Any], bool]]:
    inside = f"a number from {low:g}" + (f" to {high:g}" if high < math.inf else "")
    return inside, lambda value: type(value) in (int, float) and low <= value <= high and math.isfinite(value)


def _one_of(*choices) -> tuple[str, Callable[[Any], bool]]:
    return "one of " + ", ".join(map(str, choices)), lambda value: value in choices


def _all_of(kind: type | tuple[type, ...], names: str) -> tuple[str, Callable[[Any], bool]]:
    return f"a tuple of {names}", lambda value: type(value) is tuple and value and all(isinstance(v, kind) for v in value)


def _is_block_size(value) -> bool:
    sizes = value.values() if isinstance(value, Mapping) else [value]
    return len(sizes) > 0 and all(type(size) is int and size >= 2 for size in sizes)


_ADAPTER_RULES = {
    "scope": ("a scope or a tuple of scopes", lambda v: isinstance(v, str) or _all_of(str, "")[1](v)),
    "r": _integer(1),
    "alpha": _number(0, math.inf),
    "dropout": _number(0, 0.99),
    "block_size": ("an integer of at least 2 or a mapping from module suffix to one", _is_block_size),
    "num_reflections": ("an even integer of at least 2", lambda v: type(v) is int and v >= 2 and v % 2 == 0),
    "block_dropout": _number(0, 0.99),
    "scale": _one_of(True, False),
    "last_n_blocks": _integer(1),
}
_TRAINING_RULES = {
    "learning_rate": _number(0, 1),
    "learning_rates": ("a mapping from tower or scope to rate", lambda v: isinstance(v, Mapping)),
    "scheduler": _one_of("cosine", "linear", "constant"),
    "warmup_ratio": _number(0, 1),
    "batch_size": _integer(1),
    "gradient_accumulation_steps": _integer(1),
    "num_epochs": _number(0, math.inf),
    "max_grad_norm": _number(0, math.inf),
    "adam_beta2": _number(0, 1),
    "weight_decay": _number(0, 1),
    "precision": _one_of(None, "float32", "bf16", "fp16"),
    "adapters": _all_of((LoRA, OFT), "LoRA and OFT"),
    "stages": _all_of(Stage, "Stage"),
}


def _takes(adapter: LoRA | OFT, key: str) -> bool:
    """Whether an override of `key` means this adapter: it uses that field."""
    if key == "last_n_blocks":
        return any(scope.startswith(("vision.attention", "vision.mlp")) for scope in adapter.scope)
    return getattr(adapter, key, None) is not None


def get_recipe(name: str, **overrides) -> Recipe:
    """A report's configuration by name, with values changed by keyword.

    An adapter's field (`r`, `dropout`, `block_size`, ...) changes in every adapter of the recipe that uses it; `scope` only
    where there is one adapter; `adapters` and `stages` replace the whole tuple.

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
    in_adapters = [key for key in _ADAPTER_RULES if any(_takes(adapter, key) for adapter in adapters)]
    if len(adapters) > 1:
        in_adapters.remove("scope")
    valid = {key: _TRAINING_RULES.get(key) or _ADAPTER_RULES[key] for key in (*in_adapters, *_TRAINING_RULES)}
    training = {}
    for key, value in overrides.items():
        if key not in valid:
            raise ValueError(f"recipe {name} has no {key!r}: it has {', '.join(valid)}")
        wanted, is_right = valid[key]
        if not is_right(value):
            raise ValueError(f"recipe {name}: {key} is {value!r}, it must be {wanted}")
        if key in _TRAINING_RULES:
            training[key] = value
        else:
            value = (value,) if key == "scope" and isinstance(value, str) else value
            adapters = tuple(replace(a, **{key: value}) if _takes(a, key) else a for a in adapters)
    return replace(recipe, **training | {"adapters": adapters, "overrides": overrides})
