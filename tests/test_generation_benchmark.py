import json
from pathlib import Path

import torch

from vlftlib.generation_benchmark import measure_generation

RECORD = Path(__file__).parent.parent / "data" / "reference" / "benchmarks" / "generation.json"


def test_batches_save_forwards(tmp_path):
    measured = measure_generation(device=torch.device("cpu"), output=tmp_path, quick=True)
    alone, four = measured.rows
    assert (alone["batch_size"], four["batch_size"]) == (1, 4)
    assert alone["forwards"] > 3 * four["forwards"] > 0
    written = json.loads((tmp_path / "generation.json").read_text())
    assert written["results"] == list(measured.rows) and written["settings"]["pictures"] == 8
    assert f"{four['time_ratio']:.2f}" in str(measured)


def test_the_committed_record_reaches_three_times_as_many_pictures():
    record = json.loads(RECORD.read_text())
    assert not record["settings"]["quick"] and record["environment"]["device"] == "cpu"
    assert max(row["time_ratio"] for row in record["results"]) >= 3
