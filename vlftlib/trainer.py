"""Train a recipe by transformers' Trainer, with its stages, and write the run record.

Unusual here: all adapters are in the optimizer from the start, and a stage only switches which of them get gradients (AdamW
leaves a parameter without one as it is); so one Trainer, one count of steps and its own exact resume serve every recipe.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import TrainingArguments
from transformers.integrations import is_tensorboard_available
from transformers.trainer_callback import PrinterCallback

from vlftlib import runs
from vlftlib.adapters import adapter_parameters, apply_recipe, count_parameters, save_adapters
from vlftlib.callbacks import EvaluateAt, leave_on_signal
from vlftlib.checkpoints import CheckpointedTrainer, checkpoints, writing
from vlftlib.dataset import LengthGroupedOrder, VisionLanguageCollator, VisionLanguageDataset, labelled_only
from vlftlib.devices import PlatformPolicy, apply_policy, platform_policy
from vlftlib.evaluation import ANSWERS, evaluate, write_answers
from vlftlib.forms import Example, hash_examples
from vlftlib.graph_mode import TEXT_MULTIPLE, compiled
from vlftlib.grids import grid_of
from vlftlib.memory import checkpoint_blocks, peak_memory_bytes, reset_peak_memory
from vlftlib.operators import operator_census
from vlftlib.recipes import Recipe
from vlftlib.sharding import check_sharding, whole, whole_adapters
from vlftlib.stages import StageSwitch, describe_groups, parameter_groups, plan_stages, stage_schedule
from vlftlib.watch import NonFinite, Watch, in_any_process

IDENTITY = ("max_steps", "seed", "max_length", "group_by_length", "graph_mode")  # of a config: what a resumed run must share


@dataclass(frozen=True)
class TrainConfig:
    """What belongs to a run rather than to its recipe.

    Attributes:
        max_steps: optimizer steps in all; None takes the recipe's epochs.
        seed: of adapters, order and dropout.
        save_steps: a checkpoint every so many optimizer steps; the last two are kept.
        max_length: examples of more tokens are rejected, counted in the record.
        group_by_length: put examples of like length into a batch, which saves padding; the order is less random.
        graph_mode: run the model's blocks under torch.compile; needs a processor with a fixed_grid. On an NPU untested.
        gradient_checkpointing: recompute activations in the backward, in both towers.
        eval_steps: optimizer steps after which the validation examples are answered; the end comes always.
        on_nonfinite: "stop" at the first loss or gradient that isn't finite, or "skip" that step.
        tensorboard: also log for TensorBoard, in output/runs.
    """

    max_steps: int | None = None
    seed: int = 0
    save_steps: int = 200
    max_length: int | None = 4096
    group_by_length: bool = False
    graph_mode: bool = False
    gradient_checkpointing: bool = False
    eval_steps: tuple[int, ...] = ()
    on_nonfinite: str = "stop"
    tensorboard: bool = False


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
        FileNotFoundError: the folder holds checkpoints without the record of the run that they belong to.
        ModuleNotFoundError: TensorBoard is asked for and isn't installed.
        OSError: a checkpoint or the adapters can't be written, as on a full disk; the checkpoints before stay.
        ValueError: there is no example to train on; graph mode without a fixed grid.
    """
    output, device = Path(output), model.device
    earlier = runs.load_run(output) if (output / runs.FILE).exists() else None
    if earlier and not resume:
        raise FileExistsError(f"{output} holds a run already ({earlier.outcome}): choose another folder, or resume it")
    if earlier and earlier.outcome == runs.COMPLETED:
        raise FileExistsError(f"{output} holds a completed run: there is nothing to resume")
    if config.graph_mode and grid_of(processor) is None:
        raise ValueError("graph_mode needs a fixed_grid (load_processor): else every new size of a picture is compiled anew")
    if config.tensorboard and not is_tensorboard_available():
        raise ModuleNotFoundError("logging for TensorBoard needs it installed: pip install 'vlftlib[tensorboard]'")
    saved = checkpoints(output)
    if saved and not earlier:
        raise FileNotFoundError(f"{saved[-1]} has no {runs.FILE} beside it that says of which run it is: choose another folder")
    dataset = VisionLanguageDataset(examples, processor, max_length=config.max_length)
    if not len(dataset):
        rejected = f": all {len(dataset.rejected)} were rejected, the first: {dataset.rejected[0]}" if dataset.rejected else ""
        raise ValueError(f"no example to train on{rejected}")
    policy = platform_policy(device, recipe.precision)
    apply_policy(policy)
    if config.graph_mode and policy.device == "npu":
        warnings.warn(f"graph mode by the backend {policy.graph_backend!r}: {policy.why['graph_backend']}", stacklevel=2)
    transformers.set_seed(config.seed)
    apply_recipe(model, recipe, max_dropout=policy.max_dropout, seed=config.seed)
    counts = count_parameters(model)
    described = dict(data or {}) | dict(train=len(dataset), rejected=len(dataset.rejected))
    if "hash" not in described:
        described["hash"] = hash_examples({"train": dataset.examples})
    setup = runs.describe_run(model, processor, policy, recipe=describe_recipe(recipe), data=described)
    setup["config"] = json.loads(json.dumps(dataclasses.asdict(config)))
    measured = dict(trainable_parameters=counts.trainable, total_parameters=counts.total)
    began = time.perf_counter()
    watch = Watch(device)
    parts = dict(evaluate_on or {})
    trainer = RecipeTrainer(model, processor, recipe, dataset, policy, config, output, watch)
    check_sharding(trainer.accelerator, model, [*examples, *itertools.chain(*parts.values())])
    trainer.add_callback(EvaluateAt(config.eval_steps, model, processor, parts.get("validation"), watch, metric))
    setup["environment"]["processes"] = trainer.args.world_size
    if earlier:
        _check_same_run(earlier.setup, setup, output)
    setup["stages"] = [span.as_dict() for span in trainer.spans]
    setup["optimizer_groups"] = describe_groups(model, recipe)

    def record(outcome: str) -> runs.RunRecord:
        seen = dict(measured=measured, history=watch.history, evaluations=watch.evaluations)
        run = runs.RunRecord(recipe.name, outcome, setup, **seen)
        return runs.load_run(run.save(output)) if trainer.is_world_process_zero() else run

    record("running")
    reset_peak_memory(device)
    try:
        graphs = compiled(model, policy.graph_backend) if config.graph_mode else contextlib.nullcontext()
        with _forward_dtype(model, setup), leave_on_signal(trainer) as left, graphs:
            trainer.train(resume_from_checkpoint=str(saved[-1]) if saved else None)
        if left.signal:
            raise KeyboardInterrupt
        measured |= watch.summary() | dict(peak_memory_bytes=peak_memory_bytes(device))
        measured["operators_per_step"] = trainer.count_operators()
        with whole_adapters(model):
            if trainer.is_world_process_zero():
                with writing("the adapters", output):
                    save_adapters(model, output / "adapters")
        final = [evaluate(model, processor, split, split=name, metric=metric) for name, split in parts.items()]
        watch.evaluations += [evaluation.as_dict(watch.step) for evaluation in final]
        if trainer.is_world_process_zero():
            write_answers(final, output / ANSWERS)
        measured["duration_s"] = time.perf_counter() - began
    except BaseException as error:
        try:
            record(_outcome(error, watch.step))
        except OSError as full:  # a full disk holds no record either; what ended the run is the news
            raise error from full
        raise
    finally:
        watch.close()
        trainer.hook.remove()
    return record(runs.COMPLETED)


def _outcome(error: BaseException, step: int) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"{runs.INTERRUPTED} at step {step}"
    return f"diverged at {error}" if isinstance(error, NonFinite) else f"failed at step {step}: {type(error).__name__}: {error}"


def _check_same_run(earlier: dict, setup: dict, output: Path) -> None:
    """Resuming is exact, so it is refused where it couldn't be.

    Raises:
        ValueError: another recipe, model, data set, seed, precision, or number of steps or processes; the message gives both.
    """

    def identity(of: dict) -> dict:
        config = {f"config.{name}": of["config"].get(name, False) for name in IDENTITY}
        recipe = {f"recipe.{name}": value for name, value in of["recipe"].items() if name != "overrides"}
        model, data = of["model"], of["data"]
        way = {"precision": of["policy"]["precision"], "number of processes": of["environment"].get("processes", 1)}
        processor = {f"processor.{name}": value for name, value in of.get("processor", {}).items()}
        base = processor | {"model": model["hash"], "weights": model.get("weights")}
        return recipe | config | base | way | {"data": data.get("hash"), "examples": data["train"]}

    there, here = identity(earlier), identity(setup)
    for name in there:
        if there[name] != here.get(name):
            raise ValueError(f"{output} can't be resumed with another {name}: {there[name]!r} there, {here.get(name)!r} here")


def describe_recipe(recipe: Recipe) -> dict:
    """A recipe as plain values, for a run record."""
    described = dataclasses.asdict(recipe)
    for adapter, values in zip(recipe.adapters, described["adapters"]):
        values["method"] = adapter.method
    return described


def _collate(collator: VisionLanguageCollator, items: Sequence[dict]) -> dict:
    return labelled_only(collator(items))


class RecipeTrainer(CheckpointedTrainer):
    """transformers' Trainer with a recipe's stages and rates, guards, and checkpoints of the adapters alone."""

    def __init__(self, model, processor, recipe: Recipe, dataset, policy: PlatformPolicy, config: TrainConfig, output, watch):
        self.recipe, self.config, self.watch = recipe, config, watch
        self.losses: list[torch.Tensor] = []
        if config.gradient_checkpointing:
            checkpoint_blocks(model)
        arguments = TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.gradient_accumulation_steps,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            adam_beta1=recipe.adam_beta1,
            adam_beta2=recipe.adam_beta2,
            max_grad_norm=recipe.max_grad_norm,
            optim=policy.optimizer,
            bf16=policy.precision == "bf16",
            fp16=policy.precision == "fp16",
            use_cpu=policy.device == "cpu",
            dataloader_pin_memory=policy.pin_memory,
            dataloader_num_workers=policy.workers,
            dataloader_multiprocessing_context=policy.start_method if policy.workers else None,
            ddp_backend=policy.backend if torch.distributed.is_torchelastic_launched() else None,
            ddp_find_unused_parameters=True,  # a stage or a batch without pictures leaves adapters without gradients
            save_steps=config.save_steps,
            logging_steps=1,
            logging_nan_inf_filter=False,  # a NaN must be seen
            remove_unused_columns=False,
            disable_tqdm=True,  # the watch has a bar of its own
            report_to="tensorboard" if config.tensorboard else "none",
            seed=config.seed,
            data_seed=config.seed,
        )
        batches = math.ceil(len(dataset) / (recipe.batch_size * arguments.world_size))
        self.spans = plan_stages(recipe, math.ceil(batches / recipe.gradient_accumulation_steps), config.max_steps)
        arguments.max_steps = self.spans[-1].end
        self.switch = StageSwitch(model, self.spans, watch)
        collator = VisionLanguageCollator(processor, multiple=TEXT_MULTIPLE if config.graph_mode else 1)
        # transformers refuses to train quantised weights unless it was told of adapters, and it doesn't know ours
        told, model._hf_peft_config_loaded = model._hf_peft_config_loaded, True
        try:
            super().__init__(
                model=model,
                args=arguments,
                train_dataset=dataset,
                data_collator=functools.partial(_collate, collator),
                callbacks=[self.switch, watch],
            )
        finally:
            model._hf_peft_config_loaded = told
        # It does, and says otherwise: without this every micro-batch of every process would count the same, whatever its tokens.
        self.model_accepts_loss_kwargs = True
        self.remove_callback(PrinterCallback)
        self.hook = model.register_forward_hook(self._take_part, with_kwargs=True)

    def _get_train_sampler(self, train_dataset=None):
        if not self.config.group_by_length:
            return super()._get_train_sampler(train_dataset)
        alike = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return LengthGroupedOrder(self.train_dataset.lengths, alike, self.config.seed, lambda: int(self.state.epoch or 0))

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        optimizer, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
        self.optimizer = optimizer(parameter_groups(self.model, self.recipe), **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        shape = stage_schedule(self.recipe, self.spans)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, shape)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        inputs = dict(inputs)
        self.watch.count(inputs, inputs.pop("row").tolist())
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(loss)
        if self.accelerator.sync_gradients:
            if len(inputs.get("image_grid_thw", ())):
                self.watch.check_reached(self.model)
            self._guard()
        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.config.graph_mode:  # a cache's state is one more thing that graphs would hang on
            inputs = inputs | {"use_cache": False}
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _take_part(self, module, args, inputs, output) -> None:
        """Vision adapters alone, and a batch without pictures: a loss that asks for no gradient could not go backward.

        A hook on the model, because DDP waits for the parameters that it sees in the result of the forward.
        """
        if output.loss is None or output.loss.requires_grad or not torch.is_grad_enabled():
            return
        if len(inputs.get("image_grid_thw", ())):
            self.watch.check_reached(self.model)  # a batch with pictures: an error
        output.loss = output.loss + 0.0 * sum(item.parameter.sum() for item in adapter_parameters(self.model))

    def compute_loss_context_manager(self):
        context = super().compute_loss_context_manager()
        if self.is_fsdp_enabled:  # accelerate leaves precision to FSDP's casts there, which would round the adapters too
            context.enter_context(self.accelerator.autocast())
        return context

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = None

    def _guard(self) -> None:
        """Nothing that isn't finite reaches the optimizer; with a loss scale, a gradient's overflow is the scaler's business."""
        losses, self.losses = torch.stack(self.losses), []
        if self.is_fsdp_enabled:
            self.switch.drop_other_gradients()
        scaled = self.accelerator.scaler is not None
        items = [] if scaled else adapter_parameters(self.model)
        grads = {item.name: whole(item.parameter.grad) for item in items if item.parameter.grad is not None}
        fault = in_any_process(self.watch.fault(losses, grads), self.args.device)
        if fault is None:
            return
        if self.config.on_nonfinite == "stop":
            raise NonFinite(fault)
        for item in adapter_parameters(self.model):
            if not scaled:
                item.parameter.grad = None  # AdamW leaves these alone, where zeros would still move them by their momentum
            elif item.parameter.grad is not None:
                item.parameter.grad.fill_(torch.inf)  # the scaler skips the step
        self.watch.skipped(fault)

    def count_operators(self) -> int:
        """Aten calls other than views in the forward and backward of one micro-batch."""
        batch = self._prepare_inputs(self.data_collator([self.train_dataset[i] for i in range(self.args.train_batch_size)]))
        batch.pop("row")
        self.model.train()

        def step():
            with self.compute_loss_context_manager():
                self.compute_loss(self.model, batch).backward()

        census = operator_census(step)
        self.model.zero_grad()
        return census.total


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
