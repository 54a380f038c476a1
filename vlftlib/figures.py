"""Figures from run records alone; what others reported has hatched bars and stands in a panel of its own."""

import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vlftlib.recipes import RECIPES
from vlftlib.runs import SKIPPED, RunRecord
from vlftlib.tables import MANY_CLASSES, REPORTED, comparison_table

FIGURES = Path(__file__).parent.parent / "figures"
GREY = "0.35"
MOST_ATTRIBUTES = 4  # drawn of a data set


def _palette(names: Sequence[str]) -> dict:
    """A run's colour is the same in every figure."""
    known = ["base", *RECIPES]
    order = known + [name for name in names if name not in known]
    colours = dict(zip(order, [(0.6, 0.6, 0.6), *sns.color_palette("colorblind", len(order) - 1)]))
    return {name: colours[name] for name in names}


def _where(runs: Sequence[RunRecord]) -> str:
    """On what the runs were measured, for a title."""
    places = {(run.setup["environment"]["device"], run.setup["environment"]["device_name"]) for run in runs}
    return "; ".join(sorted(f"{device}: {name}" for device, name in places))


def quality_figure(runs: Sequence[RunRecord], split: str = "test") -> Figure:
    """Accuracy and every attribute by run, in %, with 95 % intervals for the accuracies (Wilson)."""
    rows = []
    for run in runs:
        evaluation = run.evaluation(split)
        if evaluation is None:
            continue
        values = {"all attributes right": evaluation["accuracy"]}
        for name, attribute in evaluation["attributes"].items():
            many = attribute["classes"] > MANY_CLASSES
            values[f"{name} {'accuracy' if many else 'F1'}"] = attribute["accuracy" if many else "macro_f1"]
        rows += [dict(run=run.name, measure=name, percent=100 * value, n=evaluation["examples"]) for name, value in values.items()]
    data = pd.DataFrame(rows)
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    names = list(data["run"].unique())
    sns.barplot(data, x="measure", y="percent", hue="run", palette=_palette(names), ax=axes, errorbar=None)
    for bars in axes.containers:
        axes.bar_label(bars, fmt="%.1f", fontsize=8, color="white", label_type="center")
    for bars, name in zip(axes.containers, names):
        own = data[data["run"] == name].reset_index()
        for bar, row in zip(bars, own.itertuples()):
            if not row.measure.endswith("F1"):
                low, high = wilson_interval(row.percent / 100, row.n)
                axes.vlines(bar.get_x() + bar.get_width() / 2, 100 * low, 100 * high, color=GREY, linewidth=1)
    axes.set(xlabel="", ylabel="%", ylim=(0, 112), yticks=range(0, 101, 20))
    axes.set_title(f"Measured on {data['n'].iloc[0]} {split} pictures ({_where(runs)})", fontsize=10)
    axes.legend(title="", ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    sns.despine(figure)
    return figure


def wilson_interval(share: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """A 95 % interval of a share of n (Wilson, J. Am. Stat. Assoc. 22 (1927), 209)."""
    centre, spread = share + z**2 / (2 * n), z * (share * (1 - share) / n + z**2 / (4 * n**2)) ** 0.5
    return (centre - spread) / (1 + z**2 / n), (centre + spread) / (1 + z**2 / n)


def history_figure(runs: Sequence[RunRecord]) -> Figure:
    """Loss, gradient norm and learning rate by optimizer step, with each run's stages and events.

    A dashed line in the run's colour stands where a later stage begins, a dotted one where its frozen blocks begin to train.
    Triangles are loss jumps and gradient spikes; a cross at the panel's upper edge is a skipped step.
    """
    figure, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
    trained = [run for run in runs if run.history]
    for run, colour in zip(trained, _palette([run.name for run in trained]).values()):
        history = pd.DataFrame(run.history)
        for panel, column in zip(axes, ("loss", "grad_norm", "learning_rate")):
            values = pd.to_numeric(history[column])
            panel.plot(history["step"], values, color=colour, alpha=0.25 if column != "learning_rate" else 1, linewidth=0.8)
            if column != "learning_rate":
                panel.plot(history["step"], values.rolling(15, min_periods=1).median(), color=colour, label=run.name)
                _mark_events(panel, history.assign(value=values), column, colour)
            _mark_stages(panel, run.setup.get("stages", ()), colour)
    for panel, title in zip(axes, ("loss", "gradient norm before clipping", "learning rate")):
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("optimizer step")
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"Training, measured ({_where(trained)}); line: running median of 15 steps", fontsize=10)
    sns.despine(figure)
    return figure


def _mark_stages(panel: plt.Axes, stages: Sequence[dict], colour) -> None:
    edge = panel.get_xaxis_transform()  # x in steps, y as a share of the panel's height
    for number, stage in enumerate(stages, 1):
        if number > 1:
            panel.axvline(stage["first_step"] - 0.5, color=colour, linestyle="--", linewidth=0.8)
            panel.text(stage["first_step"], 0.02, f"stage {number}", color=colour, fontsize=7, transform=edge)
        if stage["first_step"] <= stage.get("frozen_until_step", 0) < stage["last_step"]:
            panel.axvline(stage["frozen_until_step"] + 0.5, color=colour, linestyle=":", linewidth=0.8)


def _mark_events(panel: plt.Axes, history: pd.DataFrame, column: str, colour) -> None:
    if "event" not in history:
        return
    kind = {"loss": "loss jump", "grad_norm": "gradient spike"}[column]
    odd = history[history["event"] == kind]
    panel.plot(odd["step"], odd["value"], linestyle="", marker="^", markersize=5, color=colour, markeredgecolor=GREY)
    skipped = history[history["event"].astype(str).str.startswith(SKIPPED)]
    top = panel.get_xaxis_transform()
    panel.plot(skipped["step"], [0.98] * len(skipped), linestyle="", marker="x", markersize=5, color=colour, transform=top)


def cost_figure(runs: Sequence[RunRecord]) -> Figure:
    """Seconds a step, peak memory, trainable parameters and operators a step, by run."""
    table = comparison_table([run for run in runs if run.history])
    columns = {"s/step": "%.3f", "peak MB": "%.0f", "trainable": "%.0f", "operators/step": "%.0f"}
    figure, axes = plt.subplots(1, 4, figsize=(10, 2.8), layout="constrained")
    for panel, (column, form) in zip(axes, columns.items()):
        bars = panel.bar(table.index, table[column].astype(float), color=list(_palette(table.index).values()), width=0.6)
        panel.bar_label(bars, fmt=form, fontsize=8, color=GREY, padding=2)
        panel.set_title(column, fontsize=10)
        panel.margins(y=0.15)
        panel.tick_params(axis="x", rotation=20, labelsize=8)
    figure.suptitle(f"Cost of training, measured ({_where(runs)})", fontsize=10)
    sns.despine(figure)
    return figure


def reported_figure() -> Figure:
    """Report A's accuracy and seconds a step, on its machines and its data: reported, not measured here."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    quality, cost = pd.read_csv(REPORTED / "quality.csv"), pd.read_csv(REPORTED / "cost.csv")
    for panel, data, column in ((axes[0], quality, "accuracy_percent"), (axes[1], cost, "step_time_s")):
        labels = [f"{row.method}\n{row.platform}" if isinstance(row.platform, str) else row.method for row in data.itertuples()]
        bars = panel.bar(labels, data[column], color="white", edgecolor=GREY, hatch="///", width=0.6)
        panel.bar_label(bars, fontsize=8, color=GREY, padding=2)
        panel.tick_params(axis="x", labelsize=8)
        panel.margins(y=0.12)
    axes[0].set_title("accuracy in %", fontsize=10)
    axes[1].set_title("seconds a step", fontsize=10)
    figure.suptitle("Reported by Report A for its own data and machines, not measured here", fontsize=10)
    sns.despine(figure)
    return figure


def check_figure(report) -> Figure:
    """A data set as `check_examples` reports it: tokens a row, the pictures' longer sides, and each attribute's values."""
    attributes = list(report.attributes.items())[:MOST_ATTRIBUTES]
    figure, axes = plt.subplots(1, 2 + len(attributes), figsize=(3.2 * (2 + len(attributes)), 3), layout="constrained")
    for panel, values, title in (
        (axes[0], report.tokens, f"tokens a row; {report.label_share:.1%} learnt"),
        (axes[1], report.longer_sides, "pictures' longer side, px"),
    ):
        if values:
            low, high = min(values), max(values)
            width = -(-(high + 1 - low) // 40)
            edges = [edge - 0.5 for edge in range(low, high + width + 1, width)]
            panel.hist(values, bins=edges, color=sns.color_palette("colorblind")[0])
            panel.set_xlim(min(edges[0], high - 5), max(edges[-1], low + 5))
        panel.set_title(title, fontsize=10)
        panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("rows")
    axes[1].set_ylabel("pictures")
    for panel, (name, values) in zip(axes[2:], attributes):
        shown = values.most_common()
        bars = panel.barh([str(value) for value, _ in shown], [count for _, count in shown], color=sns.color_palette("colorblind")[2])
        panel.bar_label(bars, fontsize=8, color=GREY, padding=2)
        panel.invert_yaxis()
        panel.margins(x=0.2)
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("rows")
    figure.suptitle(f"{len(report.examples):,} usable rows of {len(report.examples) + len(report.rejected):,}", fontsize=10)
    sns.despine(figure)
    return figure


def save_figure(figure: Figure, name: str, folder: str | os.PathLike = FIGURES) -> Path:
    """Write FOLDER/NAME.png at 150 dpi, without the date and versions that would change the file at every run."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
    return path


def overhead_figure(layers: Sequence[dict]) -> Figure:
    """What each method adds to the frozen layer's step in %, by width and dtype; rows of `oft_benchmark.measure_width`."""
    data = pd.DataFrame([row for row in layers if row["case"] != "frozen"])
    data["width"] = [f"{i:,}\n→ {o:,}" for i, o in zip(data["in_features"], data["out_features"])]
    data["percent"] = 100 * data["overhead"]
    grid = sns.catplot(data, x="width", y="percent", hue="case", col="dtype", kind="bar", palette="colorblind", height=4, aspect=1.3)
    grid.set(xlabel="", ylabel="% over the frozen layer", yscale="symlog", ylim=(1.5 * min(0, data["percent"].min()), None))
    grid.set_titles("{col_name}")
    for axes in grid.axes.flat:
        axes.axhline(0, color=GREY, linewidth=0.8)
        axes.yaxis.set_major_formatter("{x:g}")
    return grid.figure
