from dataclasses import replace

import pandas as pd
import pytest

from vlftlib.figures import cost_figure, history_figure, quality_figure, reported_figure, save_figure, wilson_interval
from vlftlib.runs import RunRecord
from vlftlib.tables import REPORTED, comparison_table, format_table, overhead_tables, published_table, write_readme

SETUP = {"environment": {"device": "cpu", "device_name": "test"}}


def evaluation(accuracy, **metrics):
    attributes = {
        "colour": {"accuracy": 0.9, "macro_f1": 0.8, "classes": 8},
        "number": {"accuracy": 0.7, "macro_f1": 0.1, "classes": 300},
    }
    return dict(
        split="test",
        step=2,
        examples=400,
        accuracy=accuracy,
        attributes=attributes,
        unparsable=1,
        images_per_second=12.5,
        metrics=metrics,
    )


HISTORY = tuple(dict(step=i, loss=2.0 / i, grad_norm=1.0, learning_rate=1e-3, step_time_s=0.2) for i in (1, 2, 3))
BASE = RunRecord("base", "completed", SETUP, {"peak_memory_bytes": 2**30}, (), (evaluation(0.5),))
TUNED = RunRecord(
    "oft_vision",
    "completed",
    SETUP,
    {"step_time_s": 0.25, "peak_memory_bytes": 2**29, "trainable_parameters": 16128, "operators_per_step": 1021},
    HISTORY,
    (evaluation(0.75),),
)
STOPPED = RunRecord("lora_text", "interrupted at step 3", SETUP, {}, HISTORY)


def test_table_holds_completed_runs_and_says_what_is_missing():
    table = comparison_table([BASE, TUNED, STOPPED])
    assert list(table.index) == ["base", "oft_vision"]
    assert table.loc["oft_vision", "accuracy %"] == 75 and table.loc["oft_vision", "colour F1 %"] == 80
    assert table.loc["base", "number accuracy %"] == 70  # too many classes for an F1
    assert pd.isna(table.loc["base", "trainable"])
    lines = format_table(table).splitlines()
    assert len(lines) == 4 and len(set(map(len, lines))) == 1
    assert "16,128" in lines[3] and "| - " in lines[2].replace(" - ", "| - ") and "0.250" in lines[3]


def test_overheads_by_method_and_width():
    rows = [
        dict(in_features=1280, out_features=3840, dtype=dtype, case=case, overhead=overhead)
        for dtype, times in (("float32", 1), ("bfloat16", 2))
        for case, overhead in (("frozen", 0), ("LoRA r 32", 0.3 * times), ("ours 64", 0.021 * times))
    ]
    single, half = (text.splitlines() for text in overhead_tables(rows).split("\n\n"))
    assert [cell.strip() for cell in single[0].split("|")[1:3]] == ["float32", "1,280 → 3,840"]
    assert [cell.strip() for cell in single[3].split("|")[1:3]] == ["ours 64", "2.1"]
    assert len(half) == 4 and half[2].split() == ["|", "LoRA", "r", "32", "|", "60.0", "|"]


def test_published_figures_stand_beside_measured_ones_and_say_so():
    metrics = {"two_class_accuracy": 0.8, "majority_class": 0.687}
    run = RunRecord("oft_vision", "completed", SETUP, {"peak_memory_bytes": 1}, (), (evaluation(0.5, **metrics),))
    text = published_table([run])
    assert text.count("measured") == 2 and text.count("published") == 2 and "68.7 %" in text and "88.4 %" in text
    assert published_table([BASE]) == ""
    assert "two class accuracy %" in comparison_table([run]) and "majority class %" not in comparison_table([run])


def test_readme_gets_its_table_between_the_marks(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("a\n<!-- results: written by make figures -->\nold\n<!-- end of results -->\nb\n")
    for _ in range(2):
        write_readme("new", path)
    assert path.read_text() == "a\n<!-- results: written by make figures -->\n\nnew\n\n<!-- end of results -->\nb\n"
    path.write_text("nothing")
    with pytest.raises(ValueError, match="no place for the results"):
        write_readme("new", path)


def test_figures_are_drawn_and_saved_the_same(tmp_path):
    runs = [BASE, TUNED]
    figures = {"q": quality_figure(runs), "h": history_figure(runs), "c": cost_figure(runs), "r": reported_figure()}
    title = figures["r"].get_suptitle()
    assert "reported" in title.lower() and "not measured" in title
    assert all(patch.get_hatch() for axes in figures["r"].axes for patch in axes.patches)
    assert not any(patch.get_hatch() for axes in figures["q"].axes for patch in axes.patches)
    heights = [patch.get_height() for patch in figures["q"].axes[0].patches]
    assert {50, 75, 80, 70} <= {round(height) for height in heights}
    paths = [save_figure(figure, name, tmp_path) for name, figure in figures.items()]
    again = save_figure(quality_figure(runs), "q2", tmp_path)
    assert paths[0].read_bytes() == again.read_bytes()


def test_history_figure_marks_stages_and_events():
    stages = [dict(first_step=1, last_step=4, frozen_until_step=2), dict(first_step=5, last_step=8)]
    history = [dict(step=i, loss=1.0, grad_norm=2.0, learning_rate=1e-3) for i in range(1, 9)]
    history[2] |= dict(event="loss jump", rows=[1], loss=5.0)
    history[5] |= dict(event="gradient spike", rows=[2], grad_norm=7.0)
    history[6] |= dict(event="skipped: overflow", rows=[3], grad_norm="inf")
    figure = history_figure([replace(TUNED, history=tuple(history), setup=SETUP | {"stages": stages})])
    for panel, events in zip(figure.axes, ([(3, 5), (7, 0.98)], [(6, 7), (7, 0.98)], [])):
        lines = {line.get_linestyle(): line.get_xdata()[0] for line in panel.lines if line.get_linestyle() in ("--", ":")}
        assert lines == {"--": 4.5, ":": 2.5} and [text.get_text() for text in panel.texts] == ["stage 2"]
        assert [tuple(xy) for line in panel.lines if line.get_marker() in "^x" for xy in line.get_xydata()] == events
    figure.canvas.draw()  # infinite norms and all


def test_interval():
    low, high = wilson_interval(0.5, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_every_reported_row_names_its_report():
    for name in ("cost", "quality", "settings", "claims"):
        assert set(pd.read_csv(REPORTED / f"{name}.csv")["report"]) <= {"A", "B", "C"}
    cost = pd.read_csv(REPORTED / "cost.csv")
    steps = cost.hours * 3600 / cost.step_time_s  # what the report's own columns imply, and its text doesn't
    assert steps.between(63_000, 66_000).all()
