"""The beginning of a run, as seen by a test on the CPU and in the rehearsal."""

import hashlib
import json
from pathlib import Path

import torch

from vlftlib import trainer
from vlftlib.adapters import adapter_parameters
from vlftlib.forms import Example
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.recipes import get_recipe


class Peek(trainer.RecipeTrainer):
    """Notes the adapters before the first step, and the rows of every batch."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not hasattr(self, "rows"):
            self.rows = []
            values = [item.parameter.detach().cpu().contiguous() for item in adapter_parameters(self.model)]
            self.start = hashlib.sha256(b"".join(value.view(torch.uint8).numpy().tobytes() for value in values)).hexdigest()
            Peek.last = self
        self.rows += inputs["row"].tolist()
        return super().training_step(model, inputs, num_items_in_batch)


def first_steps(device: str, folder: str) -> dict:
    """Four steps over FOLDER/examples.json in float32, without dropout: the start, the order and the losses."""
    original, trainer.RecipeTrainer = trainer.RecipeTrainer, Peek
    try:
        examples = [Example(**fields) for fields in json.loads(Path(folder, "examples.json").read_text())]
        values = dict(batch_size=2, gradient_accumulation_steps=2, dropout=0.0, learning_rate=1e-3, precision="float32")
        model = load_model(TINY_BASE, device=device, attention="eager")
        output = Path(folder, device.partition(":")[0])
        config = trainer.TrainConfig(max_steps=4, seed=3)
        run = trainer.train(model, load_processor(TINY_BASE), get_recipe("hybrid_staged", **values), examples, output, config=config)
    finally:
        trainer.RecipeTrainer = original
    return dict(start=Peek.last.start, rows=Peek.last.rows, losses=[entry["loss"] for entry in run.history])
