"""Checkpoints of what trains, never of the base: each is whole, or it isn't there.

One is written in a folder beside its place, flushed, and renamed, before an older one is removed. So a kill or a full disk at
any moment leaves the earlier ones, and a part of one is never the newest.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from vlftlib.adapters import adapter_parameters
from vlftlib.sharding import split_like, split_state, whole, whole_state
from vlftlib.watch import Watch

TRAINABLE, HISTORY = "trainable.safetensors", "history.json"
PARTIAL = "partial"  # where one is written
KEPT = 2


def checkpoints(output: str | os.PathLike) -> list[Path]:
    """A run's checkpoints, the newest last; an older one can be half removed."""
    found = {path: path.name.removeprefix("checkpoint-") for path in Path(output).glob("checkpoint-*")}
    return sorted((path for path, number in found.items() if number.isdigit()), key=lambda path: int(found[path]))


@contextlib.contextmanager
def writing(what: str, output: Path):
    """Inside a `with` block files are written: what goes wrong there is said with its place and the room that there is.

    Raises:
        OSError: for a full disk also where torch has a RuntimeError that doesn't say so, and safetensors an error of its own.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        free, kept = shutil.disk_usage(output).free, ", ".join(path.name for path in checkpoints(output))
        raise OSError(
            f"{what} can't be written to {output}, where {free / 1e6:,.1f} MB are free: {error}; "
            + (f"kept: {kept}, and --resume goes on from the last" if kept else "there is no earlier checkpoint")
        ) from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointedTrainer(Trainer):
    """transformers' Trainer with such checkpoints: trainable tensors, optimizer, schedule, scaler, random numbers, history.

    A subclass sets `watch` before anything else.
    """

    watch: Watch

    def _get_output_dir(self, trial) -> str:
        return str(Path(self.args.output_dir) / PARTIAL)

    def _save_checkpoint(self, model, trial) -> None:
        output, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        try:
            with writing(f"step {self.state.global_step}: the checkpoint", output):
                if self.args.should_save:
                    shutil.rmtree(output / PARTIAL, ignore_errors=True)  # of a run that was killed
                self.accelerator.wait_for_everyone()
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    self._put_in_place(output / PARTIAL / name, output / name)
        finally:
            if self.args.should_save:
                shutil.rmtree(output / PARTIAL, ignore_errors=True)

    def _put_in_place(self, written: Path, place: Path) -> None:
        for path in (*written.iterdir(), written):
            _flush(path)
        written.rename(place)
        _flush(place.parent)
        for path in checkpoints(place.parent)[:-KEPT]:
            shutil.rmtree(path)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        tensors = {item.name: whole(item.parameter.detach()).contiguous() for item in adapter_parameters(self.model)}
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / TRAINABLE)
        (folder / HISTORY).write_text(json.dumps(dict(history=self.watch.history, evaluations=self.watch.evaluations)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            return super()._save_optimizer_and_scheduler(output_dir)
        state = whole_state(self.optimizer)  # FSDP's own way saves the base too
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(split_state(state, self.optimizer))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        saved = load_file(Path(resume_from_checkpoint) / TRAINABLE)
        with torch.no_grad():
            for item in adapter_parameters(self.model):
                item.parameter.copy_(split_like(saved[item.name], item.parameter))
        kept = json.loads((Path(resume_from_checkpoint) / HISTORY).read_text())
        self.watch.history, self.watch.evaluations = kept["history"], kept["evaluations"]

    def _run_epoch(self, **options) -> None:
        """Nothing is left of a run that was killed after its last step; in the middle of an epoch the Trainer would do one more."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(**options)
