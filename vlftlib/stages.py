"""A recipe's stages and AdamW settings, as the Trainer needs them: where a stage ends, what trains in it, how fast."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import TrainerCallback

from vlftlib.adapters import AdapterParameter, adapter_parameters, stage_parameters
from vlftlib.recipe_parts import TOWER_RULES
from vlftlib.recipes import Recipe, Stage
from vlftlib.scopes import words_of
from vlftlib.sharding import is_sharded
from vlftlib.watch import Watch


@dataclass(frozen=True)
class Span:
    """A stage's place in a run: the optimizer steps after `start` done ones, up to `end`; its first blocks rest to `thaw`."""

    stage: Stage
    start: int
    thaw: int
    end: int

    def frozen_blocks(self, done: int) -> int:
        """How many of the first vision blocks rest in the step after `done` ones."""
        return self.stage.frozen_blocks if done < self.thaw else 0

    def as_dict(self) -> dict:
        """For a run record: first and last step, counted from 1, and the last with frozen blocks."""
        given = {name: value for name, value in asdict(self.stage).items() if value is not None}
        places = dict(first_step=self.start + 1, last_step=self.end)
        return given | places | (dict(frozen_until_step=self.thaw) if self.stage.frozen_blocks else {})


def plan_stages(recipe: Recipe, steps_per_epoch: int, max_steps: int | None = None) -> tuple[Span, ...]:
    """Where a run's stages begin and end; each has at least one step.

    Args:
        steps_per_epoch: optimizer steps.
        max_steps: the run's length; None takes the recipe's epochs. Where all stages are given in steps, their sum is the
            length.

    Raises:
        ValueError: the stages given in steps leave nothing for the others, or their sum isn't `max_steps`.
    """
    total = max_steps or max(1, math.ceil(steps_per_epoch * recipe.num_epochs))
    in_steps = [stage.steps for stage in recipe.stages if stage.steps]
    if len(in_steps) == len(recipe.stages):
        if max_steps not in (None, sum(in_steps)):
            raise ValueError(f"recipe {recipe.name}: its stages have {sum(in_steps)} steps in all, max_steps is {max_steps}")
        total = sum(in_steps)
    lengths = [
        stage.steps or (stage.share and stage.share * total) or (stage.epochs and stage.epochs / recipe.num_epochs * total)
        for stage in recipe.stages
    ]
    left = total - sum(length for length in lengths if length)
    if None in lengths and left <= 0:
        raise ValueError(f"recipe {recipe.name}: its stages leave {left:g} of {total} steps to the one without a length")
    spans, start, position = [], 0, 0.0
    for stage, length in zip(recipe.stages, lengths):
        position += left if length is None else length
        end = max(round(position), start + 1)
        thaw = start + round(stage.frozen_share * (end - start)) if stage.frozen_blocks else start
        spans.append(Span(stage, start, thaw, end))
        start = end
    return tuple(spans)


def stage_at(done: int, spans: Sequence[Span]) -> int:
    """The place, from 0, of the stage that the optimizer step after `done` ones belongs to."""
    return next((place for place, span in enumerate(spans) if done < span.end), len(spans) - 1)


def stage_schedule(recipe: Recipe, spans: Sequence[Span]) -> Callable[[int], float]:
    """The factor on the learning rates by steps done: linear warm-up, then the decay, in each stage anew."""

    def factor(done: int) -> float:
        span = spans[stage_at(done, spans)]
        length, done = span.end - span.start, done - span.start
        rate = 1.0 if span.stage.learning_rate is None else span.stage.learning_rate / recipe.learning_rate
        warmup = math.ceil(recipe.warmup_ratio * length)
        if done < warmup:
            return rate * (done + 1) / (warmup + 1)
        progress = (done - warmup) / max(1, length - warmup)
        shape = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}
        return rate * shape[span.stage.scheduler or recipe.scheduler]

    return factor


def settings_of(path: str, recipe: Recipe) -> dict[str, float]:
    """AdamW's settings for a module: each that of the longest word in `towers` that means it, or else the recipe's."""
    words = sorted((word for word in recipe.towers if word in words_of(path)), key=len)
    settings = {name: getattr(recipe, name) for name in TOWER_RULES}
    for word in words:
        settings |= recipe.towers[word]
    return settings


def parameter_groups(model: torch.nn.Module, recipe: Recipe) -> list[dict]:
    """One optimizer group for each setting of AdamW; every adapter's tensor is in exactly one."""
    return [
        dict(params=[item.parameter for item in items], lr=rate, weight_decay=decay, betas=(beta1, beta2))
        for (rate, decay, beta1, beta2), items in _grouped(model, recipe).items()
    ]


def describe_groups(model: torch.nn.Module, recipe: Recipe) -> list[dict]:
    """The optimizer's groups for a run record: their settings, the scopes of their tensors, how many these are."""
    return [
        dict(zip(TOWER_RULES, settings)) | dict(scopes=sorted({item.scope for item in items}), tensors=len(items))
        for settings, items in _grouped(model, recipe).items()
    ]


def _grouped(model: torch.nn.Module, recipe: Recipe) -> dict[tuple[float, ...], list[AdapterParameter]]:
    # The recipe's own settings come first, where they are used: the first group's rate is the one that is logged.
    groups = {tuple(getattr(recipe, name) for name in TOWER_RULES): []}
    for item in adapter_parameters(model):
        groups.setdefault(tuple(settings_of(item.path, recipe).values()), []).append(item)
    return {settings: items for settings, items in groups.items() if items}


class StageSwitch(TrainerCallback):
    """Lets the current stage's adapters, and no others, get gradients; tells the watch the stage's number."""

    def __init__(self, model: torch.nn.Module, spans: Sequence[Span], watch: Watch):
        self.model, self.spans, self.watch = model, spans, watch
        self.now: tuple | None = None
        self.trained: set[str] = set()

    def on_step_begin(self, args, state, control, lr_scheduler=None, **kwargs):
        if lr_scheduler.last_epoch != state.global_step:  # the Trainer leaves it behind where a loss scale skips a step
            lr_scheduler.last_epoch = state.global_step - 1
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")  # of a run whose first step was skipped
                lr_scheduler.step()
        place = stage_at(state.global_step, self.spans)
        span, self.watch.stage = self.spans[place], place + 1
        wanted = span.stage, span.frozen_blocks(state.global_step)
        if wanted != self.now:
            self.trained = {item.name for item in stage_parameters(self.model, *wanted)}
            self.now = wanted
            if is_sharded(self.model):  # what asked for no gradient in the first forward would never get one
                for item in adapter_parameters(self.model):
                    item.parameter.requires_grad_(True)

    def drop_other_gradients(self) -> None:
        """Freeze by hand where a sharded model has given all adapters gradients."""
        for item in adapter_parameters(self.model):
            if item.name not in self.trained:
                item.parameter.grad = None
