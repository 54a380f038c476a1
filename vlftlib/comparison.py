"""Runs side by side: the base's record, a process for each recipe, and one table with figures from the records."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from vlftlib.adapters import count_parameters, load_adapters
from vlftlib.devices import PlatformPolicy
from vlftlib.evaluation import ANSWERS, evaluate, write_answers
from vlftlib.figures import cost_figure, history_figure, overhead_figure, quality_figure, reported_figure, save_figure
from vlftlib.memory import peak_memory_bytes, reset_peak_memory
from vlftlib.runs import COMPLETED, FILE, RunRecord, describe_run, load_run, load_runs
from vlftlib.samples import Splits
from vlftlib.tables import comparison_table, format_table, overhead_tables, published_table, write_readme


def evaluate_run(
    model,
    processor,
    splits: Splits,
    output: str | os.PathLike,
    *,
    policy: PlatformPolicy,
    adapters: str | os.PathLike | None = None,
    names: Sequence[str] | None = None,
    batch_size: int = 16,
) -> RunRecord:
    """Evaluate a base, or adapters on it, and write a run record as training does.

    Args:
        model, processor: from `load_model`, `load_processor`.
        splits: from `load_splits`.
        output: a new folder for run.json and answers.jsonl.
        policy: the platform's, for the record.
        adapters: a run's adapters folder; they are put on the model.
        names: parts of the data; by default validation, test and catalogue, as far as there.
        batch_size: prompts a batch.

    Raises:
        FileExistsError: the folder holds a run already.
        ValueError: the data has no part of that name.
    """
    output = Path(output)
    if (output / FILE).exists():
        raise FileExistsError(f"{output} holds a run already: choose another folder")
    names = names or [name for name in ("validation", "test", "catalogue") if name in splits.parts]
    unknown = [name for name in names if name not in splits.parts]
    if unknown:
        raise ValueError(f"data {splits.name} has no split {unknown[0]!r}: it has {', '.join(splits.parts)}")
    setup = describe_run(model, processor, policy, recipe=None, data=splits.describe(), adapters=adapters and str(adapters))
    if adapters:
        load_adapters(model, adapters)
    began = time.perf_counter()
    reset_peak_memory(model.device)
    options = dict(metric=splits.metric, batch_size=batch_size)
    done = [evaluate(model, processor, splits.parts[name], split=name, **options) for name in names]
    measured = dict(
        total_parameters=count_parameters(model).total,
        peak_memory_bytes=peak_memory_bytes(model.device),
        duration_s=time.perf_counter() - began,
    )
    write_answers(done, output / ANSWERS)
    name = Path(adapters).resolve().parent.name if adapters else "base"
    record = RunRecord(name, COMPLETED, setup, measured, evaluations=tuple(e.as_dict() for e in done))
    return load_run(record.save(output))


def run_recipes(recipes: Sequence[str], folder: Path, *, shared: Sequence[str], training: Sequence[str]) -> Path:
    """Evaluate the base and train the recipes, each in a process of its own: no run's memory or random numbers hang on another's.

    Args:
        recipes: names.
        folder: gets a folder a run; where it exists, its first free sibling with a number does, so that earlier results stay.
        shared: command-line words for `evaluate` and `train`.
        training: further words for `train`.

    Returns:
        The folder that was used.
    """
    free, number = folder, 2
    while free.exists():
        free, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    if free != folder:
        print(f"{folder} holds earlier runs: these go to {free}")
    _command("evaluate", *shared, "--output", str(free / "base"))
    for name in recipes:
        _command("train", "--recipe", name, *shared, *training, "--output", str(free / name))
    return free


def _command(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "vlftlib", *words])
    if done.returncode:
        raise SystemExit(done.returncode)  # that process has said why


def show_runs(folder: str | os.PathLike, figures: str | os.PathLike, readme: str | os.PathLike | None = None) -> str:
    """The table of the runs in a folder, the base first, as text; draws their figures into `figures`.

    With `readme`, the folder is the repository's reference: README's two tables and the benchmark's figure are renewed too.
    """
    runs = sorted(load_runs(folder), key=lambda run: run.name != "base")
    text = format_table(comparison_table(runs))
    drawn = {"quality": quality_figure(runs), "reported": reported_figure()}
    if any(run.history for run in runs):
        drawn |= {"history": history_figure(runs), "cost": cost_figure(runs)}
    for name, figure in drawn.items():
        save_figure(figure, name, figures)
    if readme:
        write_readme(text, readme)
        layers = json.loads((Path(folder) / "benchmarks" / "oft.json").read_text())["results"]["layers"]
        write_readme(overhead_tables(layers), readme, "overhead")
        save_figure(overhead_figure(layers), "overhead", figures)
    return "\n".join(part for part in (text, published_table(runs), f"records in {folder}, figures in {figures}") if part)
