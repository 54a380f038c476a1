"""The command line: its results equal the calls', and bad input gives one clear line and a non-zero exit."""

import dataclasses
import json

import pytest

from vlftlib.__main__ import main
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.reading import write_examples
from vlftlib.recipes import TINY_BASE_OVERRIDES, get_recipe
from vlftlib.runs import load_run, without_times
from vlftlib.samples import QUESTION, load_splits
from vlftlib.trainer import TrainConfig, train


@pytest.fixture(scope="module")
def data(draw_examples, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate((("train", 8), ("validation", 2), ("test", 3))):
        (folder / name).mkdir()
        write_examples(draw_examples(folder / name, count, seed, catalogue=True), folder / f"{name}.jsonl", folder)
    return folder


QUICK = ["--device", "cpu", "--set", "batch_size=4", "--set", "gradient_accumulation_steps=1", "--max-steps", "2"]


@pytest.fixture(scope="module")
def tuned(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "oft_vision"
    assert main(["train", "--recipe", "oft_vision", "--data", str(data), "--output", str(output), *QUICK]) == 0
    return output


def test_train_writes_adapters_and_record(tuned):
    run = load_run(tuned)
    assert (run.name, run.outcome, len(run.history)) == ("oft_vision", "completed", 2)
    assert run.evaluation("test")["examples"] == 3 and (tuned / "adapters" / "oft-b64").is_dir()
    assert run.setup["recipe"]["overrides"]["batch_size"] == 4


def test_train_is_the_notebooks_call(tuned, data, tmp_path):
    splits = load_splits(data)
    recipe = get_recipe("oft_vision", **TINY_BASE_OVERRIDES["oft_vision"] | dict(batch_size=4, gradient_accumulation_steps=1))
    run = train(
        load_model(TINY_BASE),
        load_processor(TINY_BASE),
        recipe,
        splits.parts["train"],
        tmp_path / "run",
        evaluate_on={name: splits.parts[name] for name in ("validation", "test")},
        config=TrainConfig(max_steps=2),
        data=splits.describe(),
        metric=splits.metric,
    )
    assert _comparable(run) == _comparable(load_run(tuned)) and run.history[1]["loss"]
    files = [path / "adapters" / "oft-b64" / "adapter_model.safetensors" for path in (tmp_path / "run", tuned)]
    assert files[0].read_bytes() == files[1].read_bytes()


def _comparable(record):
    """What doesn't differ from one run to the next: no times, nor memory."""
    fields = json.loads(json.dumps(dataclasses.asdict(record)))
    fields["setup"].pop("started")
    for entry in (fields["measured"], *fields["history"]):
        for name in ("memory_bytes", "peak_memory_bytes"):
            entry.pop(name, None)
    return fields | {key: without_times(fields[key]) for key in ("measured", "history", "evaluations")}


def test_evaluate_and_predict_agree(tuned, data, tmp_path, capsys):
    words = ["--adapters", str(tuned / "adapters"), "--device", "cpu"]
    assert main(["evaluate", *words, "--data", str(data), "--splits", "test", "--output", str(tmp_path / "e")]) == 0
    assert load_run(tmp_path / "e").evaluation("test")["accuracy"] == load_run(tuned).evaluation("test")["accuracy"]
    answers = [json.loads(line)["given"] for line in (tmp_path / "e" / "answers.jsonl").read_text().splitlines()]
    capsys.readouterr()
    assert main(["predict", *words, "--json", str(data / "test")]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["answer"] for row in rows] == answers and {row["question"] for row in rows} == {QUESTION}
    assert main(["predict", *words, rows[0]["image"]]) == 0
    assert capsys.readouterr().out.strip() == answers[0]


def test_compare_runs_everything(data, tmp_path, capfd):
    words = ["compare", "--data", str(data), "--recipes", "lora_text", "oft_vision", "--output", str(tmp_path / "runs"), *QUICK]
    assert main(words) == 0
    out = capfd.readouterr().out
    rows = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert rows[0] == "run" and rows[2:] == ["base", "lora_text", "oft_vision"]
    assert {path.name for path in (tmp_path / "runs" / "figures").iterdir()} == {
        "quality.png",
        "history.png",
        "cost.png",
        "reported.png",
    }


BAD = {
    "no model": (["--model", "/missing"], "model '/missing': no such folder"),
    "no recipe": (["--recipe", "oft"], "unknown recipe 'oft': there are lora_text,"),
    "no device": (["--device", "npu"], "device 'npu' can't be used: torch_npu is not installed"),
    "odd device": (["--device", "gpu"], "device 'gpu': must be npu, cuda or cpu"),
    "no data": (["--data", "missing.jsonl"], "missing.jsonl"),
    "odd value": (["--set", "learning_rate=fast"], "learning_rate is 'fast'"),
    "odd key": (["--set", "speed=1"], "has no 'speed'"),
    "odd block": (["--set", "block_size=50"], "50"),
    "half a pair": (["--set", "r"], "write key=value"),
}


@pytest.mark.parametrize("words, message", BAD.values(), ids=BAD)
def test_bad_words_give_one_clear_line(words, message, data, tmp_path, capsys):
    usual = ["--recipe", "oft_vision", "--model", str(TINY_BASE), "--data", str(data), "--device", "cpu"]
    assert main(["train", *usual, *words, "--output", str(tmp_path / "new")]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "new" / "run.json").exists()


def test_rows_without_their_picture_are_listed(data, tmp_path, capsys):
    good = (data / "test.jsonl").read_text()
    (tmp_path / "bad").mkdir()
    for name in ("train", "validation", "test"):
        (tmp_path / "bad" / f"{name}.jsonl").write_text(good)
    words = ["--recipe", "oft_vision", "--data", str(tmp_path / "bad"), "--device", "cpu", "--output", str(tmp_path / "new")]
    assert main(["train", *words]) == 1
    err = capsys.readouterr().err
    assert "error: " in err and "no example for train, validation, test (0 found, 9 rejected; the first: " in err


def test_pictures_that_cannot_be_read_are_named(data, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes(b"nothing")
    picture = sorted((data / "test").iterdir())[0]
    assert main(["predict", "--device", "cpu", str(tmp_path / "broken.png"), str(picture)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{picture}: ") and "broken.png" in err
    assert main(["predict", "--device", "cpu", str(tmp_path / "missing.png")]) == 1
    assert "missing.png" in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vlftlib.trainer.RecipeTrainer.training_step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    words = ["--recipe", "oft_vision", "--data", str(data), "--output", str(tmp_path / "run"), *QUICK]
    assert main(["train", *words]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n")
    assert load_run(tmp_path / "run").outcome == "interrupted at step 0"


def test_earlier_results_stay(tuned, data, capsys):
    before = (tuned / "run.json").read_text()
    assert main(["train", "--recipe", "oft_vision", "--data", str(data), "--output", str(tuned), *QUICK]) == 1
    assert "holds a run already" in capsys.readouterr().err
    assert (tuned / "run.json").read_text() == before


def test_a_full_disk_is_said_and_recorded(data, tmp_path, capsys, monkeypatch):
    def full(*words):
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr("vlftlib.trainer.save_adapters", full)
    words = ["--recipe", "oft_vision", "--data", str(data), "--output", str(tmp_path / "run"), *QUICK]
    assert main(["train", *words]) == 1
    message = f"the adapters can't be written to {tmp_path / 'run'}, where "
    err = capsys.readouterr().err
    assert f"error: {message}" in err and "MB are free: [Errno 28] No space left on device" in err and "kept: checkpoint-2" in err
    assert load_run(tmp_path / "run").outcome.startswith(f"failed at step 2: OSError: {message}")


def test_operators_checks_parts_and_attention(capsys):
    assert main(["operators", "--recipe", "oft_dual", "--device", "cpu", "--precision", "float32"]) == 0
    out = capsys.readouterr().out
    assert "0 of " in out and "recommended: " in out
    assert main(["operators", "--recipe", "nonsense", "--device", "cpu"]) == 1
    assert "error: unknown recipe 'nonsense'" in capsys.readouterr().err


def test_merge_writes_a_folder_that_answers_alike(tuned, data, tmp_path, capsys):
    picture = str(sorted((data / "test").iterdir())[0])
    assert main(["merge", "--adapters", str(tuned / "adapters"), "--output", str(tmp_path / "merged")]) == 0
    capsys.readouterr()
    answers = []
    for words in (["--adapters", str(tuned / "adapters")], ["--model", str(tmp_path / "merged")]):
        assert main(["predict", "--device", "cpu", *words, picture]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


def test_check_and_plan_say_what_they_find(data, tmp_path, capsys):
    assert main(["check", str(data / "test.jsonl"), "--write", str(tmp_path / "out.jsonl"), "--root", str(data)]) == 0
    assert "3 rows, 3 usable" in capsys.readouterr().out and len((tmp_path / "out.jsonl").read_text().splitlines()) == 3
    assert main(["plan", "--model", str(TINY_BASE), "--recipe", "oft_vision", "--batch-size", "2"]) == 0
    assert "peak" in capsys.readouterr().out
