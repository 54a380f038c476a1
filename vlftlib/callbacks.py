"""What happens between optimizer steps besides watching: evaluation at chosen steps, leaving on a signal."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import torch
from transformers import Trainer, TrainerCallback

from vlftlib.evaluation import evaluate
from vlftlib.forms import Example
from vlftlib.watch import Watch


class EvaluateAt(TrainerCallback):
    """Evaluates on the validation examples after chosen optimizer steps."""

    def __init__(self, steps: Sequence[int], model, processor, examples: Sequence[Example] | None, watch: Watch, metric: Callable | None):
        self.steps, self.model, self.processor = frozenset(steps), model, processor
        self.examples, self.watch, self.metric = examples, watch, metric
        if steps and not examples:
            raise ValueError(f"eval_steps {tuple(steps)}: there are no validation examples to evaluate on")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs and state.global_step in self.steps:
            evaluation = evaluate(self.model, self.processor, self.examples, split="validation", metric=self.metric)
            self.watch.evaluations.append(evaluation.as_dict(state.global_step))
            self.watch.pause()


class LeaveOnSignal(TrainerCallback):
    """Ends the run after the optimizer step under way, with a checkpoint, once a signal has come to any process."""

    def __init__(self):
        self.signal: int | None = None

    def on_step_end(self, args, state, control, **kwargs):
        came = torch.tensor(self.signal or 0, device=args.device)
        if args.world_size > 1:
            torch.distributed.all_reduce(came, torch.distributed.ReduceOp.MAX)
        if came.item():
            self.signal = int(came)
            control.should_save = control.should_training_stop = True


@contextlib.contextmanager
def leave_on_signal(trainer: Trainer):
    """Let the first SIGTERM or Ctrl-C end the run in order; a second one ends it at once. Only in a process's main thread."""
    left = LeaveOnSignal()
    trainer.add_callback(left)
    if threading.current_thread() is not threading.main_thread():
        yield left
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number, frame):
        left.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)
        print("leaving after this step, with a checkpoint; once more to leave at once", file=sys.stderr)

    for number in before:
        signal.signal(number, note)
    try:
        yield left
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
