"""The benchmark's counted figures, which hang on no clock, and that its record says what was run."""

import json

import pytest
import torch

from vlftlib import oft_benchmark
from vlftlib.__main__ import main

CPU = torch.device("cpu")


def test_a_towers_operators():
    counts = {row["case"]: row["operators"] for row in oft_benchmark.count_tower(block_size=64)}
    ours = [counts[f"ours, norm of Q {norm}"] for norm in (0.1, 1, 10)]
    assert counts["frozen"] < ours[0] < ours[1] < ours[2] < counts["LoRA r 32"]
    assert ours[0] <= 0.7 * counts["PEFT OFT"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_bytes_do_not_grow_with_tokens(dtype):
    rows = [
        {row["case"]: row for row in oft_benchmark.measure_width(128, 64, tokens, 4, [8, 32], dtype, CPU, repeats=1)}
        for tokens in (128, 512)
    ]
    for size in (8, 32):
        few, many = (row[f"ours {size}"]["saved_bytes"] for row in rows)
        assert few == many <= 128 * size * 4
    few, many = (row["ours Householder"]["saved_bytes"] for row in rows)
    assert few == many == 2 * 128 * oft_benchmark.REFLECTIONS * dtype.itemsize
    few, many = (row[f"LoRA r {oft_benchmark.RANK}"]["saved_bytes"] for row in rows)
    assert few < many


def test_errors_after_training():
    errors = {row["case"]: row["error"] for row in oft_benchmark.measure_errors(64, 16, CPU)}
    assert errors["ours 16"] < 1e-5 and errors["ours Householder"] < 1e-5 < errors["PEFT OFT 16"]


def test_the_command_writes_a_record_and_a_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(oft_benchmark, "WIDTHS", {(1280, 1280): 2})
    monkeypatch.setattr(oft_benchmark, "count_tower", lambda *args, **kwargs: [])
    assert main(["benchmark", "oft", "--quick", "--device", "cpu", "--output", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "oft.json").read_text())
    assert record["settings"]["quick"] and record["environment"]["device"] == "cpu" and record["git"]
    cases = [row["case"] for row in record["results"]["layers"] if row["dtype"] == "float32"]
    assert cases[:3] == ["frozen", "LoRA r 32", "PEFT OFT 4"] and "ours 16" in cases and "PEFT PSOFT r 32" in cases
    assert (tmp_path / "oft.png").stat().st_size > 10_000
    assert "ours 16" in capsys.readouterr().out
