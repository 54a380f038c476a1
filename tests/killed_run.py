"""What test_kills starts: a run that kills itself, by SIGKILL, at a moment that it is given.

python killed_run.py EXAMPLES OUTPUT STEPS [MOMENT AMOUNT]. At "batch" 3.4 it dies in the fourth micro-batch of this process, when
0.4 of the third one's time has passed; at "file" 7 before the eighth file of a run that is opened, renamed or removed while
checkpoints are written; at "end" so in the write of the adapters.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from vlftlib import trainer
from vlftlib.forms import Example
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.recipes import get_recipe


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killed(trainer.RecipeTrainer):
    batches, took = 0, 0.0

    def training_step(self, *words, **options):
        began = time.perf_counter()
        if moment == "batch" and self.batches == int(amount):
            threading.Timer(amount % 1 * self.took, die).start()
        loss = super().training_step(*words, **options)
        self.batches, self.took = self.batches + 1, time.perf_counter() - began
        return loss


def counted(write):
    """The function; in it each change to a file counts down to the end."""

    def counting(*words, **options):
        counting.on = True
        try:
            return write(*words, **options)
        finally:
            counting.on = False

    def count(event, arguments):
        if not counting.on:
            return
        if event in ("os.rename", "os.remove", "os.rmdir") or event == "open" and str(output) in str(arguments[0]):
            counting.left -= 1
            if counting.left < 0:
                die()

    counting.on, counting.left = False, amount
    sys.addaudithook(count)
    return counting


if __name__ == "__main__":
    folder, output, steps, moment, amount = *map(Path, sys.argv[1:3]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
    if moment == "file":
        Killed._save_checkpoint = counted(trainer.RecipeTrainer._save_checkpoint)
    if moment == "end":
        trainer.save_adapters = counted(trainer.save_adapters)
    trainer.RecipeTrainer = Killed
    examples = [Example(**fields) for fields in json.loads((folder / "examples.json").read_text())]
    stages = [{"train": ["oft"], "share": 0.5}, {"train": ["lora", "oft"]}]
    sizes = dict(batch_size=2, gradient_accumulation_steps=2, block_size=32, dropout=0.1, learning_rate=2e-3)
    config = trainer.TrainConfig(max_steps=steps, save_steps=2)
    recipe = get_recipe("hybrid_staged", stages=stages, **sizes)
    trainer.train(load_model(TINY_BASE), load_processor(TINY_BASE), recipe, examples, output, config=config, resume=output.is_dir())
