"""What test_distributed starts by torchrun: the command line, with what each process saw noted in OUTPUT-rank-N.jsonl.

Set STOP_AT to kill the last process before that optimizer step. On the CPU accelerate turns to DDP whatever it is asked for;
where FSDP is, it is told here that the processes are an accelerator's, and shards all the same.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from vlftlib import trainer
from vlftlib.__main__ import main
from vlftlib.adapters import adapter_parameters
from vlftlib.sharding import whole


class Noting(trainer.RecipeTrainer):
    def create_accelerator_and_postprocess(self):
        if os.environ.get("ACCELERATE_USE_FSDP") == "true":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()

    def training_step(self, model, inputs, *words, **options):
        if os.environ.get("STOP_AT") == str(self.state.global_step) and self.args.process_index == self.args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        adapters = [whole(item.parameter.detach()) for item in adapter_parameters(self.model)]
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in adapters)).hexdigest()
        pictures = len(inputs.get("image_grid_thw", ()))
        note = dict(step=self.state.global_step, wrapper=type(model).__name__, adapters=digest, pictures=pictures)
        self.note(note | dict(processes=self.args.world_size, rows=inputs["row"].tolist()))
        return super().training_step(model, inputs, *words, **options)

    def note(self, entry: dict) -> None:
        with Path(f"{self.args.output_dir}-rank-{self.args.process_index}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    trainer.RecipeTrainer = Noting
    sys.exit(main(sys.argv[1:]))
