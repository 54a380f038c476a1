"""A recipe's stages and learning rates, as the Trainer needs them: where a stage ends, what trains in it, how fast."""

import math
from collections.abc import Callable, Sequence

import torch
from transformers import TrainerCallback

from vlftlib.adapters import adapter_parameters, stage_parameters
from vlftlib.recipes import Recipe


def stage_ends(recipe: Recipe, steps: int) -> tuple[int, ...]:
    """The optimizer steps done when each stage ends; each stage has at least one step."""
    ends, share = [], 0.0
    for i, stage in enumerate(recipe.stages):
        share += stage.share
        ends.append(max(round(share * steps), i + 1))
    return tuple(ends)


def stage_at(step: int, ends: Sequence[int]) -> int:
    """The stage that the optimizer step after `step` done ones belongs to."""
    return next((i for i, end in enumerate(ends) if step < end), len(ends) - 1)


def stage_schedule(recipe: Recipe, ends: Sequence[int]) -> Callable[[int], float]:
    """The factor on the learning rate by step: linear warm-up, then the recipe's decay, in each stage anew."""

    def factor(step: int) -> float:
        stage = stage_at(step, ends)
        start = ends[stage - 1] if stage else 0
        length, done = ends[stage] - start, step - start
        warmup = math.ceil(recipe.warmup_ratio * length)
        if done < warmup:
            return (done + 1) / (warmup + 1)
        progress = (done - warmup) / max(1, length - warmup)
        return {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}[recipe.scheduler]

    return factor


def learning_rate_of(scope: str, recipe: Recipe) -> float:
    """The recipe's rate for a scope: that of the longest word of `learning_rates` that it begins with."""
    words = [word for word in recipe.learning_rates if scope == word or scope.startswith(f"{word}.")]
    return recipe.learning_rates[max(words, key=len)] if words else recipe.learning_rate


def parameter_groups(model: torch.nn.Module, recipe: Recipe) -> list[dict]:
    """One optimizer group a learning rate; every adapter's tensor is in exactly one, trained in the first stage or later."""
    groups: dict[float, list] = {}
    for item in adapter_parameters(model):
        groups.setdefault(learning_rate_of(item.scope, recipe), []).append(item.parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in groups.items()]


class StageSwitch(TrainerCallback):
    """Lets the current stage's adapters, and no others, get gradients."""

    def __init__(self, model: torch.nn.Module, recipe: Recipe, ends: Sequence[int]):
        self.model, self.recipe, self.ends = model, recipe, ends

    def on_step_begin(self, args, state, control, **kwargs):
        stage_parameters(self.model, self.recipe.stages[stage_at(state.global_step, self.ends)])
