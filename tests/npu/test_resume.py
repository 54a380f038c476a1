"""A run that is killed in fp16 goes on exactly: adapters, losses, the device's random numbers and the loss scale."""

import dataclasses
import json
import signal
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vlftlib import rehearsal
from vlftlib.runs import load_run

CACHE = Path(__file__).parents[2] / rehearsal.CACHE
SCRIPT = """
    import functools, json, os, signal, sys
    from pathlib import Path
    import torch
    from safetensors.torch import save_file
    from vlftlib import trainer
    from vlftlib.adapters import adapter_parameters
    from vlftlib.forms import Example
    from vlftlib.models import TINY_BASE, load_model, load_processor
    from vlftlib.recipes import get_recipe

    folder, word = Path(sys.argv[1]), sys.argv[2]
    trainer.platform_policy = functools.partial(trainer.platform_policy, workers=0)

    class Scaled(trainer.RecipeTrainer):
        # A scale that is far too high, and that grows after two good steps: it changes in nearly every step.
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            self.accelerator.scaler = torch.npu.amp.GradScaler(init_scale=2.0**22, growth_interval=2)

        def training_step(self, *words, **options):
            if word == "kill" and self.state.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().training_step(*words, **options)

    trainer.RecipeTrainer = Scaled
    examples = [Example(**fields) for fields in json.loads((folder / "examples.json").read_text())]
    recipe = get_recipe("lora_text", batch_size=2, gradient_accumulation_steps=1, dropout=0.02, learning_rate=1e-3)
    model = load_model(TINY_BASE, device="npu:0", attention="eager")
    config = trainer.TrainConfig(max_steps=8, save_steps=2)
    output = folder / ("whole" if word == "whole" else "killed")
    trainer.train(model, load_processor(TINY_BASE), recipe, examples, output, config=config, resume=word == "resume")
    save_file({p.name: p.parameter.detach().cpu() for p in adapter_parameters(model)}, output / "last.safetensors")
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly(examples, tmp_path):
    (tmp_path / "examples.json").write_text(json.dumps([dataclasses.asdict(example) for example in examples[:8]]))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    for word, status in (("whole", 0), ("kill", -signal.SIGKILL), ("resume", 0)):
        done = rehearsal.rehearse([str(script), str(tmp_path), word], cache=CACHE, capture=True)
        assert done.returncode == status, done.stderr[-3000:]
    whole, again = load_run(tmp_path / "whole"), load_run(tmp_path / "killed")
    assert whole.outcome == again.outcome == "completed"
    assert list(again.history) == list(whole.history)
    assert (tmp_path / "whole/last.safetensors").read_bytes() == (tmp_path / "killed/last.safetensors").read_bytes()
    assert {value.dtype for value in load_file(tmp_path / "whole/last.safetensors").values()} == {torch.float32}
    # What the scaler did is in the record: an overflow is a step that is skipped and halves, two good ones double.
    scales = [2.0**22, *(entry["loss_scale"] for entry in whole.history)]
    skipped = [entry.get("event", "").startswith("skipped: overflow in fp16") for entry in whole.history]
    assert any(skipped[:4]) and not all(skipped) and any(after == 2 * before for before, after in zip(scales, scales[1:]))
    for before, after, entry, left in zip(scales, scales[1:], whole.history, skipped):
        assert after in ([before / 2] if left else [before, 2 * before])
        assert len(entry["rows"]) == 2 if left else entry["grad_norm"] < 1e3
