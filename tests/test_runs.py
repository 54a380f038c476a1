import json
import math

import pytest

from vlftlib.runs import RunRecord, git_state, load_run, load_runs, without_times

RUN = RunRecord(
    "oft_vision",
    "completed",
    {"seed": 0},
    {"step_time_s": 0.25},
    ({"step": 1, "loss": 2.0},),
    ({"split": "test", "accuracy": 0.5, "step": 1}, {"split": "test", "accuracy": 0.75, "step": 2}),
)


def test_record_comes_back_as_it_was(tmp_path):
    path = RUN.save(tmp_path / "run")
    assert load_run(path) == load_run(tmp_path / "run") == RUN
    assert [run.name for run in load_runs(tmp_path)] == ["oft_vision"]
    assert repr(RUN) == "RunRecord(oft_vision, completed, 1 steps, 2 evaluations)"


def test_last_evaluation_of_a_split():
    assert RUN.evaluation()["accuracy"] == 0.75
    assert RUN.evaluation("validation") is None


def test_a_failed_write_leaves_the_earlier_record(tmp_path):
    RUN.save(tmp_path)
    with pytest.raises(ValueError):
        RunRecord("bad", "completed", {"value": math.nan}).save(tmp_path)
    with pytest.raises(TypeError):
        RunRecord("bad", "completed", {"value": object()}).save(tmp_path)
    assert load_run(tmp_path) == RUN
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 1}', '{"schema": 99, "name": "x"}', '{"schema": 1, "odd": 2}', "{"])
def test_what_is_no_record_is_named(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json: not a run record"):
        load_runs(tmp_path)


def test_no_record_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match="make run"):
        load_runs(tmp_path)


def test_git_state_here_and_outside(tmp_path):
    assert git_state(tmp_path) == {"commit": None}
    assert json.dumps(git_state())


def test_times_can_be_left_out():
    seen = {"step_time_s": 1, "peak_memory_bytes": 2, "history": [{"loss": 1.0, "data_wait_s": 3}], "images_per_second": 4}
    assert without_times(seen) == {"peak_memory_bytes": 2, "history": [{"loss": 1.0}]}
