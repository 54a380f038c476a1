"""Run records and the OFT benchmark's as tables, for the terminal and for README.md."""

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from vlftlib.runs import COMPLETED, RunRecord

REPORTED = Path(__file__).parent.parent / "data" / "reported"
MANY_CLASSES = 20  # an attribute of more classes is shown by its accuracy: each class is too rare for an F1


def comparison_table(runs: Sequence[RunRecord], split: str = "test") -> pd.DataFrame:
    """One row a completed run; a value that wasn't measured is missing.

    Columns: accuracy and each attribute in %, images/s, s/step, peak memory in MB, trainable parameters, operators a step.
    """
    rows = {}
    for run in runs:
        evaluation = run.evaluation(split)
        if run.outcome != COMPLETED or evaluation is None:
            continue
        row = {"accuracy %": 100 * evaluation["accuracy"]}
        for name, attribute in evaluation["attributes"].items():
            kind = "accuracy" if attribute["classes"] > MANY_CLASSES else "macro_f1"
            row[f"{name} {'accuracy' if kind == 'accuracy' else 'F1'} %"] = 100 * attribute[kind]
        for name, value in evaluation["metrics"].items():
            if name != "majority_class":
                row[f"{name.replace('_', ' ')} %"] = 100 * value
        row["unparsable"] = evaluation["unparsable"]
        row["images/s"] = evaluation.get("images_per_second")
        row["s/step"] = run.measured.get("step_time_s")
        row["peak MB"] = run.measured["peak_memory_bytes"] / 2**20
        row["trainable"] = run.measured.get("trainable_parameters")
        row["operators/step"] = run.measured.get("operators_per_step")
        rows[run.name] = row
    table = pd.DataFrame.from_dict(rows, orient="index")
    for name in ("unparsable", "trainable", "operators/step"):
        if name in table:
            table[name] = table[name].astype("Int64")
    return table


def format_table(table: pd.DataFrame) -> str:
    """The table as Markdown, which reads well in a terminal too."""
    digits = {"s/step": 3, "peak MB": 0}

    def show(name: str, value) -> str:
        if pd.isna(value):
            return "-"
        return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits.get(name, 1)}f}"

    header = [table.index.name or "run", *table.columns]
    body = [[name, *(show(column, row[column]) for column in table.columns)] for name, row in table.astype(object).iterrows()]
    widths = [max(map(len, column)) for column in zip(header, *body)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:]))]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(header), rule, *map(line, body)])


def overhead_tables(layers: Sequence[dict]) -> str:
    """What each method adds to the frozen layer's step in %, median of the rounds, a table a dtype; rows of `measure_width`."""
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for row in layers:
        if row["case"] != "frozen":
            width = f"{row['in_features']:,} → {row['out_features']:,}"
            tables.setdefault(row["dtype"], {}).setdefault(width, {})[row["case"]] = 100 * row["overhead"]
    return "\n\n".join(format_table(pd.DataFrame(table).rename_axis(dtype)) for dtype, table in tables.items())


def published_table(runs: Sequence[RunRecord], split: str = "test") -> str:
    """ELPV's two-class accuracy beside the larger class and what others published; "" for other data."""
    measured = {run.name: run.evaluation(split)["metrics"] for run in runs if run.evaluation(split)}
    measured = {name: metrics for name, metrics in measured.items() if "two_class_accuracy" in metrics}
    if not measured:
        return ""
    majority = next(iter(measured.values()))["majority_class"]
    lines = [f"  {name:<38} {100 * metrics['two_class_accuracy']:5.1f} %  measured" for name, metrics in measured.items()]
    lines.append(f"  {'always the larger class':<38} {100 * majority:5.1f} %  measured")
    for row in pd.read_csv(REPORTED / "elpv.csv").itertuples():
        lines.append(f"  {row.method:<38} {row.two_class_accuracy_percent:5.1f} %  published: {row.report}, their own split")
    return "\n".join(["Two classes (defect probability above one half):", *lines])


def write_readme(text: str, readme: str | os.PathLike, place: str = "results") -> None:
    """Put a table between README's two marks for a place.

    Raises:
        ValueError: the marks aren't there.
    """
    path, begin, end = Path(readme), f"<!-- {place}: written by make figures -->", f"<!-- end of {place} -->"
    before, found, rest = path.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"{path}: no place for the {place}: it needs the lines {begin} and {end}")
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
