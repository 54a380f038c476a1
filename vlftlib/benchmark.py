"""Timing that a noisy machine can't spoil: the cases take turns in one process, and what counts is their ratio."""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

import torch

from vlftlib.devices import REHEARSAL, describe_environment
from vlftlib.runs import git_state, without_times


def interleave(
    cases: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    device: torch.device,
    undo: Mapping[str, Callable[[], object]] = MappingProxyType({}),
) -> dict[str, list[float]]:
    """Seconds of each case in each of `repeats` rounds, after one round that isn't counted.

    A round runs every case once, in an order that turns round by round: what slows the machine down for a while slows all.

    Args:
        cases: functions by name.
        repeats: rounds.
        device: where they run; it has finished when the clock is read.
        undo: called after the case of the same name, outside its time.
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            _wait_for(device)
            began = time.perf_counter()
            cases[name]()
            _wait_for(device)
            if turn:
                seconds[name].append(time.perf_counter() - began)
            if name in undo:
                undo[name]()
    return seconds


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def summary(seconds: list[float]) -> dict[str, float]:
    """The median and the least, in seconds."""
    return dict(median_s=statistics.median(seconds), least_s=min(seconds))


def save_benchmark(name: str, settings: dict, results: list[dict], folder: str | os.PathLike, device: torch.device) -> Path:
    """Write FOLDER/NAME.json: what was measured, on what, with which software and commit; from the rehearsal without times."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(device)
    content = dict(
        benchmark=name,
        settings=settings,
        results=without_times(results) if environment["device"] == REHEARSAL else results,
        environment=environment,
        git=git_state(),
        written=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
