"""Words for the parts of a Qwen2.5-VL model, and the modules that they mean.

The patch embedding (a Conv3d) and `lm_head` are in no scope: the one is no linear layer, the other is tied to the embedding
in the 3B model.
"""

import functools
import logging
import re
from collections.abc import Iterable

from torch import nn

logger = logging.getLogger(__name__)

# Old and new transformers layouts differ in what comes before these: `visual.`, `model.visual.`; `model.layers.`,
# `model.language_model.layers.`. A module's place is the part that they share. The order matters: a module's own scope is
# the first that holds it.
SCOPES = {
    "vision.attention": r"visual\.blocks\.(?P<block>\d+)\.attn\.(?:qkv|proj)",
    "vision.attention.output": r"visual\.blocks\.(?P<block>\d+)\.attn\.proj",
    "vision.mlp": r"visual\.blocks\.(?P<block>\d+)\.mlp\.(?:gate|up|down)_proj",
    "vision.merger": r"visual\.merger\.mlp\.[02]",
    "text.attention": r"layers\.\d+\.self_attn\.[qkvo]_proj",
    "text.mlp": r"layers\.\d+\.mlp\.(?:gate|up|down)_proj",
}


def _in_scope(path: str, scope: str) -> re.Match | None:
    return re.fullmatch(rf"(?:.*\.)?(?P<place>{SCOPES[scope]})", path)


@functools.cache
def scope_of(path: str) -> str | None:
    """The scope that a module path lies in ("vision.attention" for both qkv and proj), None outside all."""
    return next((scope for scope in SCOPES if _in_scope(path, scope)), None)


def tower_of(path: str) -> str:
    """The tower that a module path lies in: "vision", "text" or "other"."""
    return (scope_of(path) or "other").split(".")[0]


def words_of(path: str) -> tuple[str, ...]:
    """All words that mean a module, the widest first: ("vision", "vision.attention", "vision.attention.output") for a `proj`."""
    return (tower_of(path), *(scope for scope in SCOPES if _in_scope(path, scope)))


def vision_block_of(path: str) -> int | None:
    """The number of the vision block that a module path lies in, from 0; None outside the blocks."""
    match = _in_vision_block(path)
    return int(match["block"]) if match else None


def place_of(path: str) -> str | None:
    """A module path without the wrappers and layout before it ("layers.0.mlp.up_proj"), None outside all scopes."""
    return next((match["place"] for scope in SCOPES if (match := _in_scope(path, scope))), None)


def select_modules(model: nn.Module, scope: str | Iterable[str], last_n_blocks: int | None = None) -> list[str]:
    """The exact paths of a model's linear modules in a scope, in the model's order.

    Works on transformers' old and new layouts, on wrapped and on adapted models (an adapted module counts as itself).

    Args:
        scope: one of `SCOPES`, or several, which join.
        last_n_blocks: of the vision blocks only the last so many; all (logged) where the model has fewer.

    Returns:
        Module paths for `model.get_submodule`.

    Raises:
        ValueError: an unknown scope, one without modules in this model (both list what there is), or `last_n_blocks`
            below 1 or without a scope of vision blocks.
    """
    scopes = (scope,) if isinstance(scope, str) else tuple(scope)
    linear = [path for path, module in model.named_modules() if hasattr(module, "in_features")]
    there = {word: [path for path in linear if _in_scope(path, word)] for word in SCOPES}
    wrong = [word for word in scopes if not there.get(word)]
    if wrong or not scopes:
        listed = ", ".join(f"{word} ({len(paths)} modules)" for word, paths in there.items() if paths)
        named = ", ".join(map(repr, wrong)) or "()"
        raise ValueError(f"scope {named} has no modules in this model; there is {listed or 'none'}")
    chosen = {path for word in scopes for path in there[word]}
    if last_n_blocks is not None:
        blocks = {path: block for path in linear if (block := vision_block_of(path)) is not None}
        depth = 1 + max(blocks.values(), default=-1)
        if type(last_n_blocks) is not int or last_n_blocks < 1 or chosen.isdisjoint(blocks):
            raise ValueError(
                f"last_n_blocks is {last_n_blocks!r} for scope {', '.join(scopes)}: it must be at least 1, and it means "
                "the vision blocks (scopes vision.attention, vision.attention.output, vision.mlp)"
            )
        if last_n_blocks > depth:
            _log_all_taken(last_n_blocks, depth)
        chosen -= {path for path, block in blocks.items() if block < depth - last_n_blocks}
    return [path for path in linear if path in chosen]


@functools.cache  # once is enough: a recipe's modules are selected several times, to check, to count, to adapt
def _log_all_taken(asked: int, depth: int) -> None:
    logger.warning("last_n_blocks is %d, the model has %d vision blocks: all are taken", asked, depth)


def _in_vision_block(path: str) -> re.Match | None:
    return _in_scope(path, "vision.attention") or _in_scope(path, "vision.mlp")
