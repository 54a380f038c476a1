"""What a recipe is made of (LoRA, OFT, stages), and the values that a field of a recipe may have.

Field names of `LoRA` and `OFT` are the arguments of `apply_lora` and `apply_oft`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from vlftlib.scopes import SCOPES

METHODS = ("lora", "oft")
TOWERS = ("vision", "text")


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
    """A part of the run: what trains in it, for how long, how fast.

    Attributes:
        train: methods ("lora", "oft"), towers ("vision", "text") or scopes; an adapter that one of them means trains.
        share: its part of the run's steps. At most one of `share`, `epochs` and `steps`; a stage with none takes the rest.
        epochs: of the recipe's `num_epochs`; a run of another number of steps keeps the proportion.
        steps: optimizer steps, whatever the run's length.
        learning_rate: in place of the recipe's; towers with a rate of their own keep their ratio to it. None: the recipe's.
        scheduler: None: the recipe's.
        frozen_blocks: the adapters on so many of the vision tower's first blocks rest at first, their scale with them.
        frozen_share: for which part of the stage's steps they rest.

    Raises:
        ValueError: a value out of range, or two lengths; names what would be right.
    """

    train: tuple[str, ...]
    share: float | None = None
    epochs: float | None = None
    steps: int | None = None
    learning_rate: float | None = None
    scheduler: str | None = None
    frozen_blocks: int = 0
    frozen_share: float = 1.0

    def __post_init__(self):
        for name, rule in _STAGE_RULES.items():
            value = getattr(self, name)
            if name == "train" or value is not None:
                check_value("a stage's", name, value, rule)
        lengths = {name: getattr(self, name) for name in ("share", "epochs", "steps") if getattr(self, name) is not None}
        if len(lengths) > 1:
            raise ValueError(f"a stage's length is {lengths}: give one of share, epochs and steps, or none for the rest")


def overlap(scope: str, word: str) -> bool:
    """Whether a scope and a word (method, tower or scope) have modules in common, by their names."""
    return scope == word or scope.startswith(f"{word}.") or word.startswith(f"{scope}.")


def means(word: str, adapter: LoRA | OFT) -> bool:
    """Whether a word means an adapter or some of its modules."""
    return word == adapter.method or any(overlap(scope, word) for scope in adapter.scope)


def read_stages(value: Any) -> Any:
    """Stages written as plain values, as on a command line or in a run record, to `Stage`s; anything else as it is.

    Raises:
        ValueError: a key that a stage doesn't have, or a wrong value.
    """
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(_read_stage(stage) if isinstance(stage, Mapping) else stage for stage in value)


def _read_stage(values: Mapping) -> Stage:
    names = [field.name for field in fields(Stage)]
    wrong = [key for key in values if key not in names]
    if wrong or "train" not in values:
        raise ValueError(f"stage {dict(values)}: {f'no {wrong[0]!r} here' if wrong else 'no train'}; it has {', '.join(names)}")
    train = values["train"]
    return Stage(**dict(values) | {"train": (train,) if isinstance(train, str) else tuple(train)})


Rule = tuple[str, Callable[[Any], bool]]  # what is right, in words, and whether a value is


def check_value(whose: str, name: str, value: Any, rule: Rule) -> None:
    wanted, is_right = rule
    if not is_right(value):
        raise ValueError(f"{whose} {name} is {value!r}, it must be {wanted}")


def integer(least: int) -> Rule:
    return f"an integer of at least {least}", lambda value: type(value) is int and value >= least


def number(low: float, high: float = math.inf) -> Rule:
    inside = f"a number from {low:g}" + (f" to {high:g}" if high < math.inf else "")
    return inside, lambda value: type(value) in (int, float) and low <= value <= high and math.isfinite(value)


def above_zero(high: float = math.inf) -> Rule:
    inside = "a number above 0" + (f" and at most {high:g}" if high < math.inf else "")
    return inside, lambda value: type(value) in (int, float) and 0 < value <= high and math.isfinite(value)


def one_of(*choices) -> Rule:
    return "one of " + ", ".join(map(str, choices)), lambda value: value in choices


def all_of(kind: type | tuple[type, ...], names: str) -> Rule:
    return f"a tuple of {names}", lambda value: type(value) is tuple and value and all(isinstance(v, kind) for v in value)


def _is_block_size(value: Any) -> bool:
    sizes = value.values() if isinstance(value, Mapping) else [value]
    return len(sizes) > 0 and all(type(size) is int and size >= 2 for size in sizes)


SCHEDULER = one_of("cosine", "linear", "constant")
ADAPTER_RULES = {
    "scope": ("a scope or a tuple of scopes", lambda value: isinstance(value, str) or all_of(str, "")[1](value)),
    "r": integer(1),
    "alpha": number(0),
    "dropout": number(0, 0.99),
    "block_size": ("an integer of at least 2 or a mapping from module suffix to one", _is_block_size),
    "num_reflections": ("an even integer of at least 2", lambda value: type(value) is int and value >= 2 and value % 2 == 0),
    "block_dropout": number(0, 0.99),
    "scale": one_of(True, False),
    "last_n_blocks": integer(1),
}
# What may differ from tower to tower: AdamW's settings.
TOWER_RULES = {
    "learning_rate": number(0, 1),
    "weight_decay": number(0, 1),
    "adam_beta1": number(0, 0.9999),
    "adam_beta2": number(0, 0.999999),
}
_WORDS = (*METHODS, *TOWERS, *SCOPES)
_STAGE_RULES = {
    "train": (
        f"a tuple of {', '.join(_WORDS)}",
        lambda value: type(value) is tuple and value and all(word in _WORDS for word in value),
    ),
    "share": above_zero(1),
    "epochs": above_zero(),
    "steps": integer(1),
    "learning_rate": number(0, 1),
    "scheduler": SCHEDULER,
    "frozen_blocks": integer(0),
    "frozen_share": above_zero(1),
}


def check_towers(value: Any) -> None:
    """Check a recipe's `towers`.

    Raises:
        ValueError: no mapping, an unknown word or setting, or a value out of range.
    """
    words, settings = (*TOWERS, *SCOPES), ", ".join(TOWER_RULES)
    example = "{'vision.merger': {'learning_rate': 1e-4}}"
    if not isinstance(value, Mapping) or not all(isinstance(inner, Mapping) for inner in value.values()):
        raise ValueError(f"towers is {value!r}, it must be a mapping from tower or scope to {settings}, as {example}")
    for word, inner in value.items():
        if word not in words:
            raise ValueError(f"towers has no {word!r}: there are {', '.join(words)}")
        for name, setting in inner.items():
            if name not in TOWER_RULES:
                raise ValueError(f"towers[{word!r}] has no {name!r}: a tower has {settings}")
            check_value(f"towers[{word!r}]'s", name, setting, TOWER_RULES[name])
