import json

import torch

from vlftlib.check_benchmark import measure_check


def test_a_quick_measurement_is_written(tmp_path):
    found = measure_check(device=torch.device("cpu"), output=tmp_path, quick=True)
    record = json.loads((tmp_path / "check.json").read_text())
    thumbnails, photographs = record["results"]
    assert (thumbnails["rows"], thumbnails["groups"]) == (300, 3) and photographs["rows"] == 8
    for row in record["results"]:
        assert 0 < row["share_with_search"] and row["share"] == row["bare"]["median_s"] / row["check"]["median_s"]
    assert record["benchmark"] == "check" and record["settings"]["quick"] and "bare decoding's speed" in str(found)
