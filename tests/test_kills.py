"""Training killed by SIGKILL at random moments, and inside the write of a checkpoint, goes on exactly.

`pytest -s tests/test_kills.py` prints where each kill fell and from which checkpoint the run went on.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vlftlib.runs import load_run

# The process counts down: a kill falls so many seconds into its training, or at so many flushed files of its checkpoints.
SCRIPT = """
import json, os, signal, sys, threading
from pathlib import Path
from vlftlib import trainer
from vlftlib.forms import Example
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.recipes import get_recipe

folder, output, steps, moment, amount = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def flush_or_die(descriptor, flush=os.fsync):
    global amount
    amount -= 1
    if amount < 0:
        die()
    flush(descriptor)


if __name__ == "__main__":
    examples = [Example(**fields) for fields in json.loads((folder / "examples.json").read_text())]
    stages = [{"train": ["oft"], "share": 0.5}, {"train": ["lora", "oft"]}]
    sizes = dict(batch_size=2, gradient_accumulation_steps=2, block_size=32, dropout=0.1, learning_rate=2e-3)
    config = trainer.TrainConfig(max_steps=steps, save_steps=1)
    if moment == "seconds":
        original = trainer.RecipeTrainer.training_step

        def training_step(self, *words, **options):
            trainer.RecipeTrainer.training_step = original
            threading.Timer(amount, die).start()
            return original(self, *words, **options)

        trainer.RecipeTrainer.training_step = training_step
    if moment == "files":
        trainer.os.fsync = flush_or_die
    recipe = get_recipe("hybrid_staged", stages=stages, **sizes)
    trainer.train(load_model(TINY_BASE), load_processor(TINY_BASE), recipe, examples, output, config=config, resume=output.is_dir())
"""


def start(folder: Path, output: Path, steps: int, moment: str = "never", amount: float = 0) -> int:
    words = [sys.executable, str(folder / "script.py"), str(folder), str(output), str(steps), moment, str(amount)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def checkpoints(output: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in output.glob("checkpoint-*"))


def same(ours, theirs) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_equals_one_that_was_not(kills, examples, tmp_path):
    """With two stages, dropout, accumulation and a reading process; every other kill falls while a checkpoint is written."""
    (tmp_path / "examples.json").write_text(json.dumps([dataclasses.asdict(example) for example in examples[:12]]))
    (tmp_path / "script.py").write_text(SCRIPT)
    whole, killed, rng = tmp_path / "whole", tmp_path / "killed", random.Random(0)
    steps = 6 * kills + 4  # more than pass between the kills
    assert start(tmp_path, whole, steps) == 0
    for kill in range(kills):
        moment, amount = ("seconds", rng.uniform(0, 0.6)) if kill % 2 else ("files", rng.randrange(8))
        before = checkpoints(killed)
        assert start(tmp_path, killed, steps, moment, amount) == -signal.SIGKILL
        now = checkpoints(killed)
        assert len(now) <= 3 and now[-1:] >= before[-1:]  # two, and a third while the oldest is being removed
        print(f"kill {kill + 1}: {amount:.2f} {moment} into training from {before[-1:] or 'the start'}; whole checkpoints: {now}")
    assert start(tmp_path, killed, steps) == 0
    once, again = load_run(whole), load_run(killed)
    exact = ("step", "loss", "grad_norm", "stage", "images", "tokens")
    assert [[entry[key] for key in exact] for entry in again.history] == [[entry[key] for key in exact] for entry in once.history]
    assert [entry["step"] for entry in again.history] == list(range(1, steps + 1)) and once.history[-1]["stage"] == 2
    ours, theirs = (output / f"checkpoint-{steps}" for output in (killed, whole))
    assert same(load_file(ours / "trainable.safetensors"), load_file(theirs / "trainable.safetensors"))
    states = [torch.load(folder / "optimizer.pt", weights_only=True) for folder in (ours, theirs)]
    assert states[0]["state"] and same(*states)
