"""Run records: one JSON file a run, from which every table and figure is made."""

import dataclasses
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from vlftlib.devices import REHEARSAL, PlatformPolicy, describe_environment
from vlftlib.grids import grid_of
from vlftlib.models import hash_model, quantized_weights

SCHEMA = 1
FILE = "run.json"
COMPLETED, INTERRUPTED = "completed", "interrupted"
SKIPPED = "skipped"  # how the event of a step that changed nothing begins


@dataclass(frozen=True)
class RunRecord:
    """What one run was, saw and reached.

    Attributes:
        name: the recipe's name, or "base" for an evaluation of the untuned model.
        outcome: "completed", "interrupted at step n" or "failed at step n: ..."; a reader can rely on its first word.
        setup: recipe and overrides, stages and optimizer groups, model, data, seed, device, versions and commit, as plain values.
        measured: parameters, step_time_s, peak_memory_bytes, operators_per_step, images_per_second, duration_s; a value
            that wasn't measured is absent.
        history: one entry an optimizer step, see `watch.Watch`.
        evaluations: one entry an evaluation: split, step, examples, accuracy, attributes, unparsable, images_per_second.
    """

    name: str
    outcome: str
    setup: dict
    measured: dict = field(default_factory=dict)
    history: tuple = ()
    evaluations: tuple = ()

    def __repr__(self) -> str:
        return f"RunRecord({self.name}, {self.outcome}, {len(self.history)} steps, {len(self.evaluations)} evaluations)"

    def evaluation(self, split: str = "test") -> dict | None:
        """The last evaluation on a split, or None."""
        return next((entry for entry in reversed(self.evaluations) if entry["split"] == split), None)

    def save(self, folder: str | os.PathLike) -> Path:
        """Write FOLDER/run.json, whole or not at all: a full disk or a kill leaves the earlier file as it was.

        On the stand-in for CANN a clock's values would mean nothing and are left out.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        content = {"schema": SCHEMA} | dataclasses.asdict(self)
        if self.setup.get("environment", {}).get("device") == REHEARSAL:
            content |= {key: without_times(content[key]) for key in ("measured", "history", "evaluations")}
        text = json.dumps(content, indent=1, allow_nan=False)
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=FILE, delete=False) as file:
            try:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                os.unlink(file.name)
                raise
        os.chmod(file.name, 0o644)
        os.replace(file.name, folder / FILE)
        return folder / FILE


def describe_run(model, processor, policy: PlatformPolicy, *, recipe: dict | None, data: dict, **more) -> dict:
    """A record's setup as plain values: what ran on what, with which software and commit; `more` is added to the model's part."""
    size, grid = processor.image_processor.size, grid_of(processor)
    setup = dict(
        recipe=recipe,
        model=dict(name=str(model.config._name_or_path), hash=hash_model(model), weights=quantized_weights(model)) | more,
        processor=dict(min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"], fixed_grid=grid and str(grid)),
        data=data,
        policy=policy.as_dict(),
        environment=describe_environment(model.device),
        git=git_state(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return json.loads(json.dumps(setup))  # as a reader of the record will see it


def without_times(value):
    """Plain values without those that a clock gave."""
    if isinstance(value, dict):
        timed = ("_s", "_per_second", "_share", "overhead", "time_ratio")
        return {key: without_times(inner) for key, inner in value.items() if not key.endswith(timed)}
    return [without_times(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def load_run(path: str | os.PathLike) -> RunRecord:
    """Read one run record, given its file or its folder.

    Raises:
        ValueError: the file isn't a run record of a schema that this version reads.
    """
    path = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        content = json.loads(path.read_text())
        schema = content.pop("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema} where {SCHEMA} is needed")
        record = RunRecord(**content)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a run record: {error}") from error
    return dataclasses.replace(record, history=tuple(record.history), evaluations=tuple(record.evaluations))


def load_runs(folder: str | os.PathLike) -> list[RunRecord]:
    """All run records under a folder (run.json files at any depth, or *.json directly in it), by path.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = Path(folder)
    paths = sorted({*folder.rglob(FILE), *folder.glob("*.json")})
    if not paths:
        raise FileNotFoundError(f"{folder}: no run record (run.json) here: make run writes some to data/runs")
    return [load_run(path) for path in paths]


def git_state(folder: str | os.PathLike = Path(__file__).parent) -> dict:
    """The commit and whether the tree differs from it; {"commit": None} outside a git checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
        except FileNotFoundError:  # git isn't installed
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"commit": commit} if commit is None else {"commit": commit, "dirty": bool(git("status", "--porcelain"))}
