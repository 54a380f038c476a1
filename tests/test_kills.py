"""Training killed by SIGKILL at random moments, and inside the write of a checkpoint, goes on exactly.

The kills are printed: where each fell, and from which checkpoint the run went on.
"""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vlftlib.checkpoints import checkpoints
from vlftlib.runs import load_run

TESTS = Path(__file__).parent


def start(folder: Path, output: Path, steps: int, moment: str = "never", amount: float = 0) -> int:
    words = [sys.executable, str(TESTS / "killed_run.py"), str(folder), str(output), str(steps), moment, str(amount)]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    said = folder / "said.txt"  # a pipe would stay open until the reading process has seen that its parent is gone
    with said.open("w") as file:
        status = subprocess.run(words, env=environment, stdout=file, stderr=file, timeout=300).returncode
    assert status in (0, -signal.SIGKILL), said.read_text()[-3000:]
    return status


def steps_saved(output: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in checkpoints(output)]


def same(ours, theirs) -> bool:
    if isinstance(ours, torch.Tensor | np.ndarray):
        return np.array_equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours == theirs


def moments(kills: int, seed: int) -> list[tuple[str, float]]:
    """In a micro-batch and in the write of a checkpoint in turn; of many kills the last one while the adapters are written."""
    rng = random.Random(seed)
    drawn = [("file", rng.randrange(20)) if kill % 2 else ("batch", round(rng.uniform(0, 8), 2)) for kill in range(kills)]
    return [*drawn[:-1], ("end", rng.randrange(5))] if kills > 2 else drawn


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_a_run_killed_at_random_moments_equals_one_that_was_not(kills, examples, tmp_path, capsys):
    """With two stages, dropout, accumulation, a reading process, and more than an epoch."""
    (tmp_path / "examples.json").write_text(json.dumps([dataclasses.asdict(example) for example in examples[:12]]))
    whole, killed, steps = tmp_path / "whole", tmp_path / "killed", 4 * kills + 5  # more than pass between the kills
    parts = []
    assert start(tmp_path, whole, steps) == 0
    for number, (moment, amount) in enumerate(moments(kills, seed=6), 1):
        before = steps_saved(killed)
        assert start(tmp_path, killed, steps, moment, amount) == -signal.SIGKILL
        now, part = steps_saved(killed), [path.name for path in killed.glob("partial/*")]
        assert len(now) <= 3 and now[-1:] >= before[-1:]  # two, and a third while the oldest is being removed
        parts += part
        with capsys.disabled():
            since = f"resumed at step {before[-1]}" if before else "from the start"
            print(f"\nkill {number} of {kills}: {since}, killed at {moment} {amount}; whole {now}, in part {part}", end="")
    assert parts, "no kill fell into the write of a checkpoint"
    assert start(tmp_path, killed, steps) == 0
    once, again = load_run(whole), load_run(killed)
    exact = ("step", "loss", "grad_norm", "learning_rate", "stage", "images", "tokens")
    assert [[entry[key] for key in exact] for entry in again.history] == [[entry[key] for key in exact] for entry in once.history]
    assert [entry["step"] for entry in again.history] == list(range(1, steps + 1)) and once.history[-1]["stage"] == 2
    assert not (killed / "partial").exists() and steps_saved(killed) == steps_saved(whole) == [steps - 1, steps]
    for name in (f"checkpoint-{steps}/trainable", "adapters/oft-b32/adapter_model", "adapters/lora/adapter_model"):
        assert same(*(load_file(output / f"{name}.safetensors") for output in (killed, whole)))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        ours, theirs = (torch.load(output / f"checkpoint-{steps}" / name, weights_only=False) for output in (killed, whole))
        assert ours and same(ours, theirs), name
