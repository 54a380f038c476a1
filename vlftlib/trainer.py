"""Train a recipe by transformers' Trainer, with its stages, and write the run record.

Unusual here: all adapters are in the optimizer from the start, and a stage only switches which of them get gradients (AdamW
leaves a parameter without one as it is); so one Trainer, one count of steps and its own exact resume serve every recipe.
Checkpoints hold the trainable tensors, never the base.
"""

import contextlib
import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tqdm.auto import tqdm
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from vlftlib import runs
from vlftlib.adapters import adapter_parameters, apply_recipe, count_parameters, save_adapters, stage_parameters
from vlftlib.dataset import VisionLanguageCollator, VisionLanguageDataset
from vlftlib.devices import PlatformPolicy, apply_policy, describe_environment, platform_policy
from vlftlib.evaluation import Evaluation, evaluate
from vlftlib.forms import Example
from vlftlib.memory import peak_memory_bytes, reset_peak_memory
from vlftlib.models import hash_model
from vlftlib.operators import operator_census
from vlftlib.recipes import Recipe

TRAINABLE, HISTORY, ANSWERS = "trainable.safetensors", "history.json", "answers.jsonl"


@dataclass(frozen=True)
class TrainConfig:
    """What belongs to a run rather than to its recipe.

    Attributes:
        max_steps: optimizer steps in all; None takes the recipe's epochs.
        seed: of adapters, order and dropout.
        save_steps: a checkpoint every so many optimizer steps; the last two are kept.
        max_length: examples of more tokens are rejected, counted in the record.
        gradient_checkpointing: recompute activations in the backward, in both towers.
    """

    max_steps: int | None = None
    seed: int = 0
    save_steps: int = 200
    max_length: int | None = 4096
    gradient_checkpointing: bool = False


def train(
    model: torch.nn.Module,
    processor,
    recipe: Recipe,
    examples: Sequence[Example],
    output: str | os.PathLike,
    *,
    evaluate_on: Mapping[str, Sequence[Example]] | None = None,
    config: TrainConfig = TrainConfig(),
    data: Mapping[str, object] | None = None,
    metric: Callable | None = None,
    resume: bool = False,
) -> runs.RunRecord:
    """Put a recipe's adapters on a model, train them, and evaluate.

    Args:
        model: a base on its device (`load_model`); it is changed.
        processor: from `load_processor`.
        recipe: from `get_recipe`.
        examples: to train on.
        output: gets adapters/, checkpoint-N/, answers.jsonl and run.json.
        evaluate_on: splits by name, answered when training is done.
        config: what belongs to this run.
        data: a description of the data, for the record.
        metric: the data set's own measure, see `evaluate`.
        resume: go on from the newest checkpoint in `output`, or from the start where there is none.

    Returns:
        The run record, as written to output/run.json. An interrupted or failed run is recorded too, and raises.

    Raises:
        FileExistsError: the folder holds a run already and `resume` is not set.
        ValueError: there is no example to train on.
    """
    output, device = Path(output), model.device
    if not resume and (output / runs.FILE).exists():
        raise FileExistsError(f"{output} holds a run already: choose another folder, or resume it")
    dataset = VisionLanguageDataset(examples, processor, max_length=config.max_length)
    if not len(dataset):
        rejected = f": all {len(dataset.rejected)} were rejected, the first: {dataset.rejected[0]}" if dataset.rejected else ""
        raise ValueError(f"no example to train on{rejected}")
    policy = platform_policy(device, recipe.precision)
    apply_policy(policy)
    transformers.set_seed(config.seed)
    apply_recipe(model, recipe, max_dropout=policy.max_dropout, seed=config.seed)
    counts = count_parameters(model)
    setup = dict(
        recipe=describe_recipe(recipe),
        config=dataclasses.asdict(config),
        model=dict(name=str(model.config._name_or_path), hash=hash_model(model)),
        data=dict(data or {}) | dict(train=len(dataset), rejected=len(dataset.rejected)),
        policy=policy.as_dict(),
        environment=describe_environment(device),
        git=runs.git_state(),
        started=runs.now(),
    )
    measured = dict(trainable_parameters=counts.trainable, total_parameters=counts.total)
    watch, evaluations, began = Watch(), [], time.perf_counter()

    def record(outcome: str) -> runs.RunRecord:
        done = [evaluation.as_dict(watch.step) for evaluation in evaluations]
        run = runs.RunRecord(recipe.name, outcome, setup, measured, tuple(watch.history), tuple(done))
        run.save(output)
        return run

    reset_peak_memory(device)
    try:
        trainer = RecipeTrainer(model, processor, recipe, dataset, policy, config, output, watch)
        with _forward_dtype(model, setup):
            trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if resume and output.is_dir() else None)
        measured |= watch.summary() | dict(peak_memory_bytes=peak_memory_bytes(device))
        measured["operators_per_step"] = trainer.count_operators()
        save_adapters(model, output / "adapters")
        evaluations += [evaluate(model, processor, split, split=name, metric=metric) for name, split in (evaluate_on or {}).items()]
        write_answers(evaluations, output / ANSWERS)
        measured["duration_s"] = time.perf_counter() - began
    except KeyboardInterrupt:
        record(f"{runs.INTERRUPTED} at step {watch.step}")
        raise
    except Exception as error:
        record(f"failed at step {watch.step}: {type(error).__name__}: {error}")
        raise
    finally:
        watch.close()
    return record(runs.COMPLETED)


def write_answers(evaluations: Sequence[Evaluation], path: Path) -> None:
    """Every expected and given answer, one JSON line each, to be read beside the run record."""
    rows = [dict(split=e.split, expected=expected, given=given) for e in evaluations for expected, given in e.answers]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def describe_recipe(recipe: Recipe) -> dict:
    """A recipe as plain values, for a run record."""
    described = dataclasses.asdict(recipe)
    for adapter, values in zip(recipe.adapters, described["adapters"]):
        values["method"] = adapter.method
    return described


class RecipeTrainer(Trainer):
    """transformers' Trainer with a recipe's stages, learning rates by tower, and checkpoints of the trainable tensors."""

    def __init__(self, model, processor, recipe: Recipe, dataset, policy: PlatformPolicy, config: TrainConfig, output, watch):
        self.recipe, self.watch = recipe, watch
        steps = config.max_steps
        if steps is None:
            batches = math.ceil(len(dataset) / recipe.batch_size)
            steps = math.ceil(batches / recipe.gradient_accumulation_steps) * recipe.num_epochs
        self.stage_ends = stage_ends(recipe, max(1, math.ceil(steps)))
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        arguments = TrainingArguments(
            output_dir=str(output),
            max_steps=self.stage_ends[-1],
            per_device_train_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.gradient_accumulation_steps,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            adam_beta2=recipe.adam_beta2,
            max_grad_norm=recipe.max_grad_norm,
            optim=policy.optimizer,
            bf16=policy.precision == "bf16",
            fp16=policy.precision == "fp16",
            use_cpu=policy.device == "cpu",
            dataloader_pin_memory=policy.pin_memory,
            dataloader_num_workers=policy.workers,
            dataloader_multiprocessing_context=policy.start_method if policy.workers else None,
            save_steps=config.save_steps,
            save_total_limit=2,
            logging_steps=1,
            logging_nan_inf_filter=False,  # a NaN must be seen
            remove_unused_columns=False,
            disable_tqdm=True,  # the watch has a bar of its own
            report_to="none",
            seed=config.seed,
            data_seed=config.seed,
        )
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=dataset,
            data_collator=VisionLanguageCollator(processor),
            callbacks=[StageSwitch(model, recipe, self.stage_ends), watch],
        )
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """One group a learning rate; every trainable tensor is in exactly one."""
        groups = {}
        for item in adapter_parameters(self.model):
            groups.setdefault(learning_rate_of(item.scope, self.recipe), []).append(item.parameter)
        optimizer, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = optimizer([{"params": group, "lr": rate} for rate, group in groups.items()], **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """Warm-up and decay within each stage."""
        shape = stage_schedule(self.recipe, self.stage_ends)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, shape)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        self.watch.count(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def count_operators(self) -> int:
        """Aten calls other than views in the forward and backward of one micro-batch."""
        batch = self._prepare_inputs(next(iter(self.get_train_dataloader())))
        self.model.train()

        def step():
            with self.compute_loss_context_manager():
                self.model(**batch).loss.backward()

        census = operator_census(step)
        self.model.zero_grad()
        return census.total

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({item.name: item.parameter.detach() for item in adapter_parameters(self.model)}, folder / TRAINABLE)
        (folder / HISTORY).write_text(json.dumps(self.watch.history))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        saved = load_file(Path(resume_from_checkpoint) / TRAINABLE)
        own = {item.name: item.parameter for item in adapter_parameters(self.model)}
        if saved.keys() != own.keys():
            odd = sorted(saved.keys() ^ own.keys())
            raise ValueError(f"{resume_from_checkpoint}: {len(odd)} adapter tensors differ from the recipe's, first {odd[0]}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(saved[name])
        self.watch.history = json.loads((Path(resume_from_checkpoint) / HISTORY).read_text())


def learning_rate_of(scope: str, recipe: Recipe) -> float:
    """The recipe's rate for a scope: that of the longest word of `learning_rates` that it begins with."""
    words = [word for word in recipe.learning_rates if scope == word or scope.startswith(f"{word}.")]
    return recipe.learning_rates[max(words, key=len)] if words else recipe.learning_rate


def stage_ends(recipe: Recipe, steps: int) -> tuple[int, ...]:
    """The step after each stage's last; each stage has at least one step."""
    ends, share = [], 0.0
    for i, stage in enumerate(recipe.stages):
        share += stage.share
        ends.append(max(round(share * steps), i + 1))
    return tuple(ends)


def stage_schedule(recipe: Recipe, ends: Sequence[int]):
    """The factor on the learning rate by step: linear warm-up, then the recipe's decay, in each stage anew."""

    def factor(step: int) -> float:
        stage = next((i for i, end in enumerate(ends) if step < end), len(ends) - 1)
        start = ends[stage - 1] if stage else 0
        length = ends[stage] - start
        warmup = math.ceil(recipe.warmup_ratio * length)
        done = step - start
        if done < warmup:
            return (done + 1) / (warmup + 1)
        progress = (done - warmup) / max(1, length - warmup)
        return {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress, "constant": 1.0}[recipe.scheduler]

    return factor


class StageSwitch(TrainerCallback):
    """Lets the current stage's adapters, and no others, get gradients."""

    def __init__(self, model: torch.nn.Module, recipe: Recipe, ends: Sequence[int]):
        self.model, self.recipe, self.ends = model, recipe, ends

    def on_step_begin(self, args, state, control, **kwargs):
        stage = next(i for i, end in enumerate(self.ends) if state.global_step < end)
        stage_parameters(self.model, self.recipe.stages[stage])


class Watch(TrainerCallback):
    """Keeps the history, one entry an optimizer step, and shows it in a progress bar."""

    def __init__(self):
        self.history, self.bar, self.step = [], None, 0
        self.images = self.tokens = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step
        self.bar = tqdm(total=state.max_steps, initial=self.step, desc="training", unit="step")
        self.mark = time.perf_counter()

    def on_step_begin(self, args, state, control, **kwargs):
        self.waited = time.perf_counter() - self.mark

    def count(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.images += len(inputs.get("image_grid_thw", ()))
        self.tokens += int(inputs["attention_mask"].sum())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" not in logs:  # the summary after the last step
            return
        now = time.perf_counter()  # the loss has been read: the device is done with the step
        entry = dict(
            step=state.global_step,
            loss=logs["loss"],
            grad_norm=logs["grad_norm"],
            learning_rate=logs["learning_rate"],
            step_time_s=now - self.mark,
            data_wait_s=self.waited,
            images=self.images,
            tokens=self.tokens,
        )
        self.history.append({key: value if math.isfinite(value) else str(value) for key, value in entry.items()})
        self.images = self.tokens = 0
        self.mark, self.step = now, state.global_step
        self.bar.set_postfix(loss=f"{logs['loss']:.3f}", grad_norm=f"{logs['grad_norm']:.2f}", refresh=False)
        self.bar.update()

    def on_save(self, args, state, control, **kwargs):
        self.mark = time.perf_counter()  # writing a checkpoint is no part of a step

    def summary(self) -> dict[str, float]:
        """Medians over the steps after the first three, which warm caches up."""
        steps = self.history[3:] or self.history
        time_s = statistics.median(entry["step_time_s"] for entry in steps)
        wait = sum(entry["data_wait_s"] for entry in steps) / sum(entry["step_time_s"] for entry in steps)
        return dict(step_time_s=time_s, data_wait_share=wait)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


@contextlib.contextmanager
def _forward_dtype(model: torch.nn.Module, setup: dict):
    """Note in `setup` the dtype that the head's output really has; a flag can say another."""

    def note(module, args, output):
        setup["forward_dtype"] = str(output.dtype).removeprefix("torch.")

    hook = model.lm_head.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()
