import contextlib
import copy
import json
import os
import re
import resource
import shutil
import signal
import warnings

import pytest
import torch
from transformers.integrations import is_tensorboard_available

from vlftlib.adapters import adapter_parameters, apply_recipe, load_adapters
from vlftlib.dataset import VisionLanguageCollator, VisionLanguageDataset, labelled_only
from vlftlib.forms import Example
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.recipes import get_recipe
from vlftlib.runs import RunRecord, load_run
from vlftlib.stages import plan_stages, stage_schedule
from vlftlib.trainer import RecipeTrainer, TrainConfig, train
from vlftlib.watch import NonFinite, Watch

QUICK = dict(batch_size=4, gradient_accumulation_steps=1)


def weights(model):
    return {item.name: item.parameter.detach().clone() for item in adapter_parameters(model)}


def stop_at(monkeypatch, step: int, error: BaseException):
    """Raise in the training step after `step` optimizer steps are done."""
    original = RecipeTrainer.training_step

    def training_step(self, *words, **options):
        if self.state.global_step == step:
            raise error
        return original(self, *words, **options)

    monkeypatch.setattr(RecipeTrainer, "training_step", training_step)


@pytest.mark.parametrize("name", ["lora_text_vision", "oft_vision"])
def test_a_run_trains_its_adapters_and_records_it(name, base, processor, examples, tmp_path):
    before = {key: value.clone() for key, value in base.state_dict().items()}
    recipe = get_recipe(name, learning_rate=1e-2, batch_size=4, gradient_accumulation_steps=2)
    parts = {"validation": examples[:2]}
    run = train(base, processor, recipe, examples, tmp_path, evaluate_on=parts, config=TrainConfig(max_steps=5))

    assert run == load_run(tmp_path) and run.outcome == "completed"
    assert [entry["step"] for entry in run.history] == [1, 2, 3, 4, 5]
    assert all(entry["images"] == 8 and entry["tokens"] == 8 * 63 and entry["stage"] == 1 for entry in run.history)
    assert run.history[-1]["loss"] < run.history[0]["loss"]
    assert run.evaluation("validation")["examples"] == 2 and run.evaluation("validation")["step"] == 5
    assert run.setup["forward_dtype"] == "float32"
    assert run.setup["recipe"]["overrides"] == dict(learning_rate=1e-2, batch_size=4, gradient_accumulation_steps=2)
    assert run.measured["operators_per_step"] > 500 and run.measured["peak_memory_bytes"] > 2**20
    assert run.measured["trainable_parameters"] == sum(item.parameter.numel() for item in adapter_parameters(base))
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2

    after = base.state_dict()
    for key, value in before.items():
        own = after.get(key, after.get(key.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias")))
        assert torch.equal(own, value), f"the base's {key} has changed"
    again = load_adapters(load_model(TINY_BASE), tmp_path / "adapters")
    for key, value in weights(base).items():
        assert torch.allclose(weights(again)[key], value, rtol=0, atol=1e-7), key


def test_a_run_is_the_same_again(processor, examples, tmp_path):
    recipe = get_recipe("oft_vision", **QUICK)
    models = [load_model(TINY_BASE) for _ in range(2)]
    for i, model in enumerate(models):
        train(model, processor, recipe, examples, tmp_path / str(i), config=TrainConfig(max_steps=2))
    first, second = map(weights, models)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["lora_text_vision", "oft_vision", "hybrid_staged"])
def test_an_adapter_that_no_gradient_reaches_is_named(name, base, processor, examples, tmp_path):
    base.model.visual.register_forward_hook(lambda module, args, out: out.__class__(**{k: v.detach() for k, v in out.items()}))
    first = {"lora_text_vision": r"visual.blocks.0.attn.qkv.lora_A.default.weight", "oft_vision": "visual.blocks.0.attn.proj.oft_R"}
    message = f"step 1: no gradient for model.{first.get(name, 'visual.merger.mlp.0.oft_R')}"
    with pytest.raises(RuntimeError, match=message):
        train(base, processor, get_recipe(name, **QUICK), examples, tmp_path, config=TrainConfig(max_steps=2))
    assert load_run(tmp_path).outcome.startswith("failed at step 0: RuntimeError")


def test_a_failure_is_recorded_and_raised(base, processor, examples, tmp_path, monkeypatch):
    stop_at(monkeypatch, 1, OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        train(base, processor, get_recipe("oft_vision", **QUICK), examples, tmp_path, config=TrainConfig(max_steps=3))
    run = load_run(tmp_path)
    assert run.outcome == "failed at step 1: OSError: [Errno 28] No space left on device" and len(run.history) == 1


def test_earlier_results_are_not_overwritten(base, processor, examples, tmp_path):
    config = TrainConfig(max_steps=1)
    train(base, processor, get_recipe("oft_vision", **QUICK), examples, tmp_path, config=config)
    before = (tmp_path / "run.json").read_text()
    for resume, message in ((False, r"holds a run already \(completed\)"), (True, "nothing to resume")):
        with pytest.raises(FileExistsError, match=message):
            train(load_model(TINY_BASE), processor, get_recipe("oft_vision"), examples, tmp_path, resume=resume)
    assert (tmp_path / "run.json").read_text() == before


def test_nothing_to_train_on(base, processor, examples, tmp_path):
    with pytest.raises(ValueError, match="no example to train on$"):
        train(base, processor, get_recipe("oft_vision"), [], tmp_path)
    with pytest.raises(ValueError, match="all 16 were rejected, the first: .*too many tokens: 63, limit 20"):
        train(base, processor, get_recipe("oft_vision"), examples, tmp_path, config=TrainConfig(max_length=20))


def test_checkpoints_hold_no_base(base, processor, examples, tmp_path):
    recipe = get_recipe("oft_vision", **QUICK)
    train(base, processor, recipe, examples, tmp_path, config=TrainConfig(max_steps=4, save_steps=1))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    files = {path.name: path.stat().st_size for path in (tmp_path / "checkpoint-4").iterdir()}
    assert files["trainable.safetensors"] < 100_000 and not any("model" in name for name in files)
    assert len(json.loads((tmp_path / "checkpoint-4" / "history.json").read_text())["history"]) == 4


def test_gradient_checkpointing_changes_no_result(processor, examples, tmp_path):
    recipe, results = get_recipe("oft_vision", **QUICK), []
    for on in (False, True):
        model = load_model(TINY_BASE)
        config = TrainConfig(max_steps=1, gradient_checkpointing=on)
        train(model, processor, recipe, examples, tmp_path / str(on), config=config)
        results.append(weights(model))
    assert all(torch.allclose(results[0][name], results[1][name], atol=1e-6) for name in results[0])


def test_a_recipe_that_does_not_fit_leaves_the_model(base):
    with pytest.raises(ValueError):
        apply_recipe(base, get_recipe("oft_vision", block_size=50))
    assert not adapter_parameters(base)


@pytest.mark.parametrize("tensor", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run_and_is_named(tensor, base, processor, examples, tmp_path, monkeypatch):
    item = next(item for item in adapter_parameters(apply_recipe(load_model(TINY_BASE), get_recipe("oft_vision"))))
    original = RecipeTrainer._guard

    def spoil(self):
        if self.state.global_step == 2 and tensor == "loss":
            self.losses[-1] = self.losses[-1] * torch.nan
        elif self.state.global_step == 2:
            next(own for own in adapter_parameters(self.model) if own.name == item.name).parameter.grad[0, 0] = torch.inf
        original(self)

    monkeypatch.setattr(RecipeTrainer, "_guard", spoil)
    config = TrainConfig(max_steps=4, save_steps=1)
    with pytest.raises(NonFinite) as fault:
        train(base, processor, get_recipe("oft_vision", **QUICK), examples, tmp_path, config=config)
    place = "in the loss" if tensor == "loss" else f"in the gradient of {item.name} and 0 more"
    assert str(fault.value).startswith(f"step 3: not finite {place}; losses [") and "rows [" in str(fault.value)
    run = load_run(tmp_path)
    assert run.outcome == f"diverged at step 3: {str(fault.value).removeprefix('step 3: ')}"
    assert all(torch.isfinite(value).all() for value in weights(base).values())
    assert (tmp_path / "checkpoint-2").is_dir()


def test_on_request_a_step_is_skipped_instead(base, processor, examples, tmp_path, monkeypatch):
    """Nothing moves then, where a step with zeros would go on by AdamW's momentum."""
    original, values = RecipeTrainer._guard, []

    def spoil(self):
        values.append(weights(self.model))
        if self.state.global_step == 1:
            adapter_parameters(self.model)[0].parameter.grad.fill_(torch.nan)
        original(self)

    monkeypatch.setattr(RecipeTrainer, "_guard", spoil)
    config = TrainConfig(max_steps=3, on_nonfinite="skip")
    run = train(base, processor, get_recipe("oft_vision", **QUICK), examples, tmp_path, config=config)
    assert run.outcome == "completed" and run.history[1]["event"].startswith("skipped: step 2: not finite")
    assert len(run.history[1]["rows"]) == 4 and "event" not in run.history[2]
    assert all(torch.equal(values[1][name], values[2][name]) for name in values[0])
    assert not any(torch.equal(values[0][name], values[1][name]) for name in values[0])


def test_eight_skipped_steps_in_a_row_are_a_fault(base, processor, examples, tmp_path, monkeypatch):
    """Also where a kill came in between: they are counted from the history."""
    original = RecipeTrainer._guard

    def spoil(self):
        if self.state.global_step in (0, *range(2, 12)):
            adapter_parameters(self.model)[0].parameter.grad.fill_(torch.nan)
        original(self)

    monkeypatch.setattr(RecipeTrainer, "_guard", spoil)
    recipe, config = get_recipe("oft_vision", **QUICK), TrainConfig(max_steps=20, save_steps=1, on_nonfinite="skip")
    with monkeypatch.context() as patch:
        stop_at(patch, 5, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train(base, processor, recipe, examples, tmp_path, config=config)
    with pytest.raises(NonFinite, match=r"step 10: 8 skipped steps in a row; the last: step 10: not finite .*, rows \["):
        train(load_model(TINY_BASE), processor, recipe, examples, tmp_path, config=config, resume=True)
    assert load_run(tmp_path).outcome.startswith("diverged at step 10: 8 skipped steps in a row")
    assert (tmp_path / "checkpoint-9").is_dir()


def scaled(monkeypatch, overflows=()):
    """Train with a loss scale, as accelerate does in fp16, and let the backwards after so many done steps overflow."""
    create, step = RecipeTrainer.create_accelerator_and_postprocess, RecipeTrainer.training_step

    def create_with_scaler(self):
        create(self)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def overflow(self, *words, **options):
        loss = step(self, *words, **options)
        if self.state.global_step in overflows:
            adapter_parameters(self.model)[0].parameter.grad[0, 0] = torch.inf
        return loss

    monkeypatch.setattr(RecipeTrainer, "create_accelerator_and_postprocess", create_with_scaler)
    monkeypatch.setattr(RecipeTrainer, "training_step", overflow)
    monkeypatch.setattr("accelerate.Accelerator.mixed_precision", "fp16")


def test_a_scalers_skips_are_no_fault_but_eight_in_a_row_are(processor, examples, tmp_path, monkeypatch):
    recipe = get_recipe("oft_vision", **QUICK)
    with monkeypatch.context() as patch:
        scaled(patch, overflows=(1, 2))
        run = train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "few", config=TrainConfig(max_steps=4))
    assert run.outcome == "completed" and [entry["loss_scale"] for entry in run.history] == [2**16, 2**15, 2**14, 2**14]
    assert [entry["step"] for entry in run.history if "event" in entry] == [2, 3]
    assert run.history[1]["event"] == "skipped: overflow in fp16, the loss scale is now 32768"
    assert len(run.history[1]["rows"]) == 4
    shape = stage_schedule(recipe, plan_stages(recipe, 4, 4))  # a skipped step counts, or stages would begin with others' rates
    assert [entry["learning_rate"] for entry in run.history] == pytest.approx([1e-4 * shape(done) for done in range(4)])
    scaled(monkeypatch, overflows=range(1, 20))
    with pytest.raises(NonFinite, match="step 9: 8 skipped steps in a row; the last: overflow in fp16.* 256, rows "):
        train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "all", config=TrainConfig(max_steps=20))


@pytest.mark.parametrize("choice", ["stop", "skip"])
def test_a_loss_that_is_not_finite_is_a_fault_whatever_the_scale(choice, base, processor, examples, tmp_path, monkeypatch):
    scaled(monkeypatch)
    original = RecipeTrainer.compute_loss
    monkeypatch.setattr(RecipeTrainer, "compute_loss", lambda *words, **options: original(*words, **options) + torch.inf)
    config = TrainConfig(max_steps=1, on_nonfinite=choice)
    stops = pytest.raises(NonFinite, match=r"in the loss; losses \[inf\], rows \[")
    with contextlib.nullcontext() if choice == "skip" else stops:
        run = train(base, processor, get_recipe("oft_vision", **QUICK), examples, tmp_path, config=config)
        assert run.history[0]["event"].startswith("skipped: step 1: not finite in the loss")
    assert all(not item.parameter.any() for item in adapter_parameters(base))


@pytest.mark.parametrize("room", [1_000, 100_000], ids=["for nothing", "for the adapters alone"])
def test_a_full_disk_stops_the_run_and_spoils_no_checkpoint(room, processor, examples, tmp_path, monkeypatch):
    """Files that can't grow any more fail as on a full disk: inside safetensors, and inside torch.save."""
    recipe, config = get_recipe("oft_vision", **QUICK), TrainConfig(max_steps=4, save_steps=1)
    whole = train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "whole", config=config)
    original, limits = RecipeTrainer._save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(self, *words):
        if self.state.global_step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            original(self, *words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    output = tmp_path / "full"
    message = f"step 3: the checkpoint can't be written to {output}, where [0-9.,]+ MB are free: .+; "
    message += "kept: checkpoint-1, checkpoint-2, and --resume goes on from the last"
    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "_save_checkpoint", save)
        with pytest.raises(OSError, match=message):
            train(load_model(TINY_BASE), processor, recipe, examples, output, config=config)
    assert re.match(f"failed at step 3: OSError: {message}", load_run(output).outcome)
    assert {path.name for path in output.iterdir()} == {"checkpoint-1", "checkpoint-2", "run.json"}
    run = train(load_model(TINY_BASE), processor, recipe, examples, output, config=config, resume=True)
    assert [entry["loss"] for entry in run.history] == [entry["loss"] for entry in whole.history]


def test_a_disk_without_room_for_the_record_hides_no_error(base, processor, examples, tmp_path, monkeypatch):
    stop_at(monkeypatch, 1, ValueError("what was wrong"))
    save = RunRecord.save

    def full(self, folder):
        if self.outcome != "running":
            raise OSError(28, "No space left on device")
        return save(self, folder)

    monkeypatch.setattr(RunRecord, "save", full)
    with pytest.raises(ValueError, match="what was wrong") as fault:
        train(base, processor, get_recipe("oft_vision", **QUICK), examples, tmp_path, config=TrainConfig(max_steps=3))
    assert "No space left" in str(fault.value.__cause__) and load_run(tmp_path).outcome == "running"


def test_a_run_killed_after_its_last_step_trains_no_further(processor, examples, tmp_path, monkeypatch):
    """In the middle of an epoch, where a resumed Trainer would go on."""
    recipe, config = get_recipe("oft_vision", batch_size=2, gradient_accumulation_steps=2), TrainConfig(max_steps=3)
    first, second = load_model(TINY_BASE), load_model(TINY_BASE)
    with monkeypatch.context() as patch:
        patch.setattr("vlftlib.trainer.save_adapters", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(first, processor, recipe, examples, tmp_path, config=config)
    run = train(second, processor, recipe, examples, tmp_path, config=config, resume=True)
    assert run.outcome == "completed" and [entry["step"] for entry in run.history] == [1, 2, 3]
    assert all(torch.equal(value, weights(second)[name]) for name, value in weights(first).items())


def test_jumps_are_noted_with_their_rows():
    watch = Watch(torch.device("cpu"))
    usual = [dict(stage=1, loss=1.0 + 0.01 * (i % 3), grad_norm=2.0) for i in range(20)]
    watch.history = usual + [dict(stage=1, loss="nan", grad_norm=0.0, event="skipped: x")] * 10
    assert watch.jump(dict(stage=1, loss=1.5, grad_norm=2.0)) is None
    assert watch.jump(dict(stage=1, loss=2.5, grad_norm=2.0)) == "loss jump"
    assert watch.jump(dict(stage=1, loss=1.0, grad_norm=9.0)) == "gradient spike"
    assert watch.jump(dict(stage=2, loss=1.0, grad_norm=9.0)) is None  # more trains there: nothing to compare with yet


def test_growth_is_warned_of_once_in_a_while():
    watch = Watch(torch.device("cpu"))
    watch.history = [dict(memory_bytes=1e9 * (1 + i / 500), step_time_s=1.0) for i in range(200)]
    watch.step = 200
    with pytest.warns(UserWarning, match=r"memory grew steadily by 29% over the last 200 steps, 2 MB a step: .*max_pixels"):
        watch.look_for_leak()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.look_for_leak()  # silent until step 300
        watch.step, watch.history = 300, [dict(memory_bytes=1e9, step_time_s=1.0)] * 200
        watch.look_for_leak()
        # Noise isn't growth, nor is one jump.
        watch.history = [dict(memory_bytes=1e9 * (1 + (i > 90)), step_time_s=1.0 + (i % 7) / 5) for i in range(200)]
        watch.look_for_leak()
    watch.history = [dict(memory_bytes=1e9, step_time_s=1.0 + i / 1000 + (i % 7) / 50) for i in range(200)]
    with pytest.warns(UserWarning, match=r"step time grew steadily by 14% .* 1 ms a step: waiting for data"):
        watch.look_for_leak()


def test_batches_without_pictures_train_vision_adapters_too(base, processor, examples, tmp_path):
    turns = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in (("user", "Hi"), ("assistant", "Ho"))]
    texts = [Example((), turns, "x", i) for i in range(4)]
    recipe = get_recipe("oft_vision", batch_size=4, gradient_accumulation_steps=1)
    run = train(base, processor, recipe, texts + examples[:4], tmp_path, config=TrainConfig(max_steps=4))
    assert run.outcome == "completed" and sum(entry["images"] for entry in run.history) == 8
    alone = train(load_model(TINY_BASE), processor, recipe, texts, tmp_path / "texts", config=TrainConfig(max_steps=1))
    assert alone.outcome == "completed" and alone.history[0]["grad_norm"] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_leaves(number, processor, examples, tmp_path, monkeypatch):
    recipe, config = get_recipe("oft_vision", **QUICK), TrainConfig(max_steps=4)
    whole = train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "whole", config=config)
    original, before = RecipeTrainer.training_step, signal.getsignal(number)

    def training_step(self, *words, **options):
        if self.state.global_step == 1:
            os.kill(os.getpid(), number)
        return original(self, *words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RecipeTrainer, "training_step", training_step)
        with pytest.raises(KeyboardInterrupt):
            train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "left", config=config)
    assert signal.getsignal(number) == before
    assert load_run(tmp_path / "left").outcome == "interrupted at step 2" and (tmp_path / "left" / "checkpoint-2").is_dir()
    run = train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "left", config=config, resume=True)
    assert [entry["loss"] for entry in run.history] == [entry["loss"] for entry in whole.history]


def test_tensorboard_is_asked_for_by_name(base, processor, examples, tmp_path):
    recipe, config = get_recipe("oft_vision", **QUICK), TrainConfig(max_steps=1, tensorboard=True)
    if is_tensorboard_available():
        pytest.skip("it is installed")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'vlftlib\[tensorboard\]'"):
        train(base, processor, recipe, examples, tmp_path / "run", config=config)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_tensorboard_gets_every_step(base, processor, examples, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe, config = get_recipe("oft_vision", **QUICK), TrainConfig(max_steps=3, tensorboard=True)
    run = train(base, processor, recipe, examples, tmp_path, config=config)
    logged = accumulator.EventAccumulator(str(next(tmp_path.glob("runs/**/events*")).parent))
    logged.Reload()
    losses = [(event.step, event.value) for event in logged.Scalars("train/loss")]
    assert losses == [(entry["step"], pytest.approx(entry["loss"], rel=1e-3)) for entry in run.history]


def test_resuming_something_else_is_refused(processor, examples, tmp_path, monkeypatch):
    recipe, config, output = get_recipe("oft_vision", **QUICK), TrainConfig(max_steps=3, save_steps=1), tmp_path / "run"
    shutil.copytree(TINY_BASE, tmp_path / "other")
    with (tmp_path / "other" / "model.safetensors").open("r+b") as file:
        file.seek(-(2**20), os.SEEK_END)
        file.write(bytes(2**20))
    with monkeypatch.context() as patch:
        stop_at(patch, 1, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train(load_model(TINY_BASE), processor, recipe, examples, output, config=config)
    again = dict(processor=processor, recipe=recipe, examples=examples, output=output, config=config, resume=True)
    for change, message in (
        (dict(recipe=get_recipe("oft_vision", **QUICK, learning_rate=1e-3)), "another recipe.learning_rate: 0.0001 there, 0.001"),
        (dict(recipe=get_recipe("lora_text", **QUICK)), "another recipe.name"),
        (dict(recipe=get_recipe("oft_vision", **QUICK, precision="bf16")), "another recipe.precision: None there, 'bf16' here"),
        (dict(config=TrainConfig(max_steps=9)), "another config.max_steps: 3 there, 9 here"),
        (dict(examples=examples[:8]), "another data: '[0-9a-f]{16}' there, '[0-9a-f]{16}' here"),
        (dict(examples=examples[::-1]), "another data: "),
        (dict(data={"hash": "a"}), "another data: '[0-9a-f]{16}' there, 'a' here"),
        (dict(processor=load_processor(TINY_BASE, min_pixels=3136)), "another processor.min_pixels: 12544 there, 3136 here"),
        (dict(model=load_model(tmp_path / "other")), "another model: '[0-9a-f]{16}' there, '[0-9a-f]{16}' here"),
    ):
        with pytest.raises(ValueError, match=f"can't be resumed with {message}"):
            train(**dict(model=load_model(TINY_BASE)) | again | change)
    monkeypatch.setattr("transformers.TrainingArguments.world_size", 2)
    with pytest.raises(ValueError, match="another number of processes: 1 there, 2 here"):
        train(load_model(TINY_BASE), **again)
    monkeypatch.undo()
    assert train(load_model(TINY_BASE), **again).outcome == "completed"


def test_checkpoints_of_nobody_knows_what_are_not_touched(base, processor, examples, tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    for resume in (False, True):
        with pytest.raises(FileNotFoundError, match="checkpoint-7 has no run.json beside it"):
            train(base, processor, get_recipe("oft_vision"), examples, tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]


def test_evaluation_at_chosen_steps_changes_nothing(processor, examples, tmp_path):
    recipe = get_recipe("lora_text", **QUICK, dropout=0.2)
    results = []
    for steps in ((), (1, 3)):
        model, config = load_model(TINY_BASE), TrainConfig(max_steps=3, eval_steps=steps)
        parts = {"validation": examples[:3]}
        run = train(model, processor, recipe, examples, tmp_path / str(steps), evaluate_on=parts, config=config)
        assert [evaluation["step"] for evaluation in run.evaluations] == [*steps, 3]
        results.append(weights(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    with pytest.raises(ValueError, match="no validation examples"):
        train(load_model(TINY_BASE), processor, recipe, examples, tmp_path / "x", config=TrainConfig(eval_steps=(1,)))


@pytest.mark.parametrize("count", [None, 100], ids=["mean", "of all processes"])
def test_logits_at_labels_alone_give_the_same_step(count, base, processor, examples):
    """Questions of different lengths, so that the labels don't all stand at the same places."""
    rows = [copy.deepcopy(example) for example in examples[:3]]
    rows[0].messages[0]["content"].append({"type": "text", "text": " Answer in the usual form."})
    dataset = VisionLanguageDataset(rows, processor)
    batch = VisionLanguageCollator(processor)([dataset[i] for i in range(3)])
    del batch["row"]
    apply_recipe(base, get_recipe("lora_dual", dropout=0.0))
    results = []
    for inputs in (batch, labelled_only(batch)):
        base.zero_grad()
        output = base(**inputs, num_items_in_batch=count)
        output.loss.backward()
        results.append((output.loss.detach(), *(item.parameter.grad.clone() for item in adapter_parameters(base))))
    labels = batch["labels"][:, 1:] != -100
    assert labels.sum(1).max() < output.logits.shape[1] < batch["labels"].shape[1] / 2
    for whole, labelled in zip(*results, strict=True):
        assert torch.allclose(labelled, whole, rtol=1e-4, atol=1e-6)
