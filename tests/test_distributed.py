"""Two gloo processes against one at the same global batch."""

import json
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from vlftlib.reading import write_examples
from vlftlib.runs import load_run

TRAIN = ["-m", "vlftlib", "--traceback", "train", "--device", "cpu", "--max-steps", "4"]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python", sys.executable]


@pytest.fixture(scope="module")
def data(draw_examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate((("train", 16), ("validation", 3), ("test", 5))):
        (folder / name).mkdir()
        write_examples(draw_examples(folder / name, count, seed), folder / f"{name}.jsonl", folder)
    return folder


def run(data, output, processes: int, recipe: str, *words: str):
    start = [sys.executable, *(TWO if processes == 2 else []), *TRAIN]
    batch = ["--set", f"batch_size={4 // processes}", "--set", "gradient_accumulation_steps=1"]
    start += ["--recipe", recipe, "--data", str(data), "--output", str(output), *batch, *words]
    done = subprocess.run(start, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_run(output)


def adapters(output):
    return {path.parent.name: load_file(path) for path in sorted((output / "adapters").rglob("*.safetensors"))}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["oft_vision", "hybrid_staged"])
def test_two_processes_equal_one(recipe, data, tmp_path):
    """Also across a stage boundary, with dropout off: masks come from each process's own stream."""
    words = ["--set", "dropout=0.0"] if recipe == "hybrid_staged" else []
    one, two = (run(data, tmp_path / str(n), n, recipe, *words, "--set", "learning_rate=0.001") for n in (1, 2))
    assert (one.setup["environment"]["processes"], two.setup["environment"]["processes"]) == (1, 2)
    assert [entry["loss"] for entry in two.history] == pytest.approx([entry["loss"] for entry in one.history], abs=1e-4)
    first, second = adapters(tmp_path / "1"), adapters(tmp_path / "2")
    assert first.keys() == second.keys()
    for folder, tensors in first.items():
        for name, tensor in tensors.items():
            assert (tensor - second[folder][name]).abs().max() < 1e-5, name
    assert one.evaluation("test")["examples"] == two.evaluation("test")["examples"] == 5
    answers = [[json.loads(line) for line in (tmp_path / n / "answers.jsonl").read_text().splitlines()] for n in "12"]
    assert answers[0] == answers[1] and len(answers[0]) == 8
