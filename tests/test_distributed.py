"""Two processes on the CPU, started by torchrun: as one process at the same global batch, sharded or not."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from vlftlib.forms import Example
from vlftlib.models import empty_model, full_size_config
from vlftlib.reading import write_examples
from vlftlib.runs import load_run

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
WORDS = ["--device", "cpu", "--max-steps", "4", "--save-steps", "2", "--set", "learning_rate=0.001"]
NEAR = 5e-5  # a twentieth of one AdamW step at that rate: where a gradient is all rounding, AdamW makes steps of it


def without_pictures(count: int) -> list[Example]:
    texts = [("Which colour is grass?", "colour: green"), ("Which colour is blood?", "colour: red")]

    def turn(role: str, text: str) -> dict:
        return {"role": role, "content": [{"type": "text", "text": text}]}

    return [Example((), [turn("user", texts[i % 2][0]), turn("assistant", texts[i % 2][1])], "", i) for i in range(count)]


@pytest.fixture(scope="module")
def data(draw_examples, tmp_path_factory):
    """The folders "pictures" and "mixed", in which half of the rows to train on have no picture."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("pictures", "mixed"):
        for seed, (part, count) in enumerate((("train", 16), ("validation", 3), ("test", 5))):
            (folder / name / part).mkdir(parents=True)
            examples = draw_examples(folder / name / part, count, seed)
            if (name, part) == ("mixed", "train"):
                examples = examples[:8] + without_pictures(8)
            write_examples(examples, folder / name / f"{part}.jsonl", folder / name)
    return folder


def launch_arguments(config: Path) -> Namespace:
    """What `accelerate launch` reads in a configuration file."""
    words = ["--config_file", str(config), "-m", "vlftlib", "train", "--recipe", "oft_vision"]
    return _validate_launch_command(launch_command_parser().parse_args(words))[0]


def fsdp_environment() -> dict[str, str]:
    """What `accelerate launch` passes on of the committed configuration."""
    launched = prepare_multi_gpu_env(launch_arguments(ROOT / "configs" / "accelerate" / "cuda_fsdp.yaml"))
    return {name: value for name, value in launched.items() if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP"}


def start(data, output, processes: int, *words: str, batch: int = 4, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *(TORCHRUN if processes == 2 else []), "tests/two_processes.py", "--traceback", "train", *WORDS]
    command += ["--data", str(data), "--output", str(output), "--set", f"batch_size={batch // processes}", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def run(*words, **options):
    done = start(*words, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_run(words[1])


def notes(output: Path) -> list[list[dict]]:
    """What each process noted."""
    files = sorted(output.parent.glob(f"{output.name}-rank-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def adapters(output: Path) -> dict:
    paths = sorted((output / "adapters").rglob("*.safetensors"))
    return {f"{path.parent.name} {name}": tensor for path in paths for name, tensor in load_file(path).items()}


def same_result(one: Path, two: Path, wrapper: str) -> None:
    first, second = load_run(one), load_run(two)
    assert (first.setup["environment"]["processes"], second.setup["environment"]["processes"]) == (1, 2)
    ranks = notes(two)
    assert len(ranks) == 2 and {note["wrapper"] for rank in ranks for note in rank} == {wrapper}
    for ours, theirs in zip(*ranks, strict=True):
        assert ours["adapters"] == theirs["adapters"] and not set(ours["rows"]) & set(theirs["rows"])
    assert len({note["adapters"] for note in ranks[0]}) == 4, "a step changed nothing"
    for key in ("loss", "grad_norm"):
        assert [entry[key] for entry in second.history] == pytest.approx([entry[key] for entry in first.history], abs=1e-4)
    tensors, others = adapters(one), adapters(two)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == others[name].shape and (tensor - others[name]).abs().max() < NEAR, name
    assert (one / "answers.jsonl").read_text() == (two / "answers.jsonl").read_text()
    assert second.evaluation("test")["examples"] == 5 and second.evaluation("validation")["examples"] == 3
    assert {path.name for path in two.iterdir()} == {"adapters", "answers.jsonl", "checkpoint-2", "checkpoint-4", "run.json"}


STAGED = ["--recipe", "hybrid_staged", "--set", "gradient_accumulation_steps=1", "--set", "dropout=0.0"]  # masks differ by process


def test_two_processes_equal_one_across_a_stage_boundary(data, tmp_path):
    run(data / "pictures", tmp_path / "one", 1, *STAGED)
    run(data / "pictures", tmp_path / "two", 2, *STAGED)
    same_result(tmp_path / "one", tmp_path / "two", "DistributedDataParallel")


@pytest.mark.slow
def test_processes_with_and_without_pictures(data, tmp_path):
    """Vision adapters alone, so that in a batch of texts none takes part; with accumulation, where each token counts the same."""
    words = ["--recipe", "oft_vision", "--gradient-checkpointing"]
    run(data / "mixed", tmp_path / "one", 1, *words, "--set", "gradient_accumulation_steps=1", batch=8)
    run(data / "mixed", tmp_path / "two", 2, *words, "--set", "gradient_accumulation_steps=2")
    same_result(tmp_path / "one", tmp_path / "two", "DistributedDataParallel")
    pictures = [tuple(note["pictures"] for note in pair) for pair in zip(*notes(tmp_path / "two"))]
    assert any(0 in pair and any(pair) for pair in pictures), "no step had pictures in one process only"


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP"])
def test_a_killed_process_costs_a_few_steps(sharded, data, tmp_path):
    """Resumed after a kill, in the second stage; sharded, the whole also equals one process."""
    environment = fsdp_environment() if sharded else {}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(data / "pictures", whole, 2, *STAGED, **environment)
    if sharded:
        run(data / "pictures", tmp_path / "one", 1, *STAGED)
        same_result(tmp_path / "one", whole, "FSDPQwen2_5_VLForConditionalGeneration")
    assert start(data / "pictures", broken, 2, *STAGED, STOP_AT="3", **environment).returncode != 0
    assert [path.name for path in broken.glob("checkpoint-*")] == ["checkpoint-2"]
    assert load_run(broken).outcome.startswith(("failed at step 3", "running"))  # as the first process heard of it or not
    again = run(data / "pictures", broken, 2, *STAGED, "--resume", **environment)
    assert [entry["loss"] for entry in again.history] == [entry["loss"] for entry in load_run(whole).history]
    ours, theirs = adapters(broken), adapters(whole)
    assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    saved = load_file(broken / "checkpoint-4" / "trainable.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == again.measured["trainable_parameters"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configurations_are_accelerates(path):
    read = launch_arguments(path)
    platform, kind = path.stem.split("_")
    assert read.module and read.training_script == "vlftlib" and not read.use_cpu and read.num_processes > 1
    assert (read.use_fsdp, read.multi_gpu) == ((True, False) if kind == "fsdp" else (False, True))
    assert "Not run on" in path.read_text() and f"--device {platform}" in path.read_text()
    if kind == "fsdp":
        classes = {type(module).__name__ for module in empty_model(full_size_config("3B")).modules()}
        assert read.fsdp_version == 2 and set(read.fsdp_transformer_layer_cls_to_wrap.split(",")) <= classes


def test_all_configurations_are_there():
    assert [path.stem for path in CONFIGS] == ["cuda_ddp", "cuda_fsdp", "npu_ddp", "npu_fsdp"]
