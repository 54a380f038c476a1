"""The words that the commands take, and what --help says of them."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from vlftlib.devices import PRECISIONS

TINY_BASE = Path(__file__).parent.parent / "data" / "tiny-base"  # as in models, whose import would load torch


def build_parser(description: str, benchmarks: Iterable[str]) -> argparse.ArgumentParser:
    """The parser of all commands; `command` in its result is the command's name.

    Args:
        description: of the whole.
        benchmarks: what the command benchmark can measure.
    """
    parser = argparse.ArgumentParser(prog="python -m vlftlib", description=description)
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text)

    def add_model(command) -> None:
        command.add_argument("--model", default=TINY_BASE, help="folder or hub name of a Qwen2.5-VL")
        command.add_argument("--device", help="npu, cuda or cpu, also npu:1; the first there is by default")
        command.add_argument("--attention", choices=("auto", "eager", "sdpa", "flash_attention_2"), help="the platform's by default")
        command.add_argument("--weights", choices=("4bit", "8bit"), help="quantise the base's weights, by bitsandbytes")
        command.add_argument("--min-pixels", type=int, help="smaller pictures are enlarged to this many; the model's by default")
        command.add_argument("--max-pixels", type=int, help="larger pictures are shrunk to this many; the model's by default")
        command.add_argument("--fixed-grid", metavar="SIZES", help="bring pictures to these, as 448x448,560x336; off by default")

    def add_data(command) -> None:
        command.add_argument("--data", default="products", help="products, elpv, or a file of examples")
        command.add_argument("--root", type=Path, help="image paths are relative to this folder; the file's own by default")

    def add_training(command) -> None:
        command.add_argument("--max-steps", type=int, help="optimizer steps; the recipe's epochs by default")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")

    command = add("train", "fine-tune by a recipe")
    add_model(command)
    add_data(command)
    add_training(command)
    command.add_argument("--recipe", required=True)
    command.add_argument("--precision", choices=PRECISIONS, help="the platform's by default")
    command.add_argument("--output", type=Path, required=True, help="a new folder for adapters, checkpoints and run.json")
    command.add_argument("--save-steps", type=int, default=200, help="optimizer steps between checkpoints")
    command.add_argument("--eval-steps", type=int, nargs="+", default=[], help="steps after which the validation part is answered")
    command.add_argument("--max-length", type=int, default=4096, help="examples of more tokens are rejected")
    command.add_argument("--group-by-length", action="store_true", help="examples of like length share a batch: less padding")
    command.add_argument("--graph-mode", action="store_true", help="under torch.compile; needs --fixed-grid; untested on an NPU")
    command.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations, in both towers")
    command.add_argument("--on-nonfinite", choices=("stop", "skip"), default="stop", help="a loss or gradient that isn't finite")
    command.add_argument("--tensorboard", action="store_true", help="also log for TensorBoard: the extra of that name")
    command.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output, or start")

    command = add("evaluate", "answer a data set and compare with its answers")
    add_model(command)
    add_data(command)
    command.add_argument("--adapters", type=Path, help="a run's adapters folder; the base alone by default")
    command.add_argument("--splits", nargs="+", help="validation, test and what else there is by default")
    command.add_argument("--batch-size", type=int, default=16)
    command.add_argument("--output", type=Path, required=True, help="a new folder for run.json and answers.jsonl")

    command = add("predict", "answer a question about pictures")
    add_model(command)
    command.add_argument("--adapters", type=Path, help="a run's adapters folder; the base alone by default")
    command.add_argument("--question", help="what the adapters were trained on by default, or the products' question")
    command.add_argument("--batch-size", type=int, default=16)
    command.add_argument("--json", action="store_true", help="JSON lines")
    command.add_argument("pictures", type=Path, nargs="+", help="pictures, or folders of them")

    command = add("compare", "evaluate the base, train recipes, evaluate them, draw figures and print one table")
    add_model(command)
    add_data(command)
    add_training(command)
    command.add_argument("--recipes", nargs="+", default=["lora_text_vision", "oft_vision"])
    command.add_argument("--output", type=Path, help="data/runs/DATA by default, with a number where that is used")
    command.add_argument("--show", type=Path, metavar="FOLDER", help="only show the runs that are in a folder")
    command.add_argument("--readme", type=Path, help="with --show: write the table into this file and figures/ again")

    command = add("check", "report on a data set: what is used, what isn't and why, lengths, copies, contradictions")
    command.add_argument("data", help="products, elpv, a folder of parts, a file of examples, or a LLaMA-Factory dataset_info.json")
    command.add_argument("--root", type=Path, help="image paths are relative to this folder; the file's own by default")
    command.add_argument("--model", default=TINY_BASE, help="whose tokens are counted")
    command.add_argument("--min-pixels", type=int)
    command.add_argument("--max-pixels", type=int)
    command.add_argument("--fixed-grid", metavar="SIZES", help="as for train")
    command.add_argument("--max-length", type=int, default=4096, help="examples of more tokens are rejected")
    command.add_argument("--allowed", type=float, default=0.01, help="share of bad rows above which the exit status is 1")
    command.add_argument("--write", type=Path, help="write the usable rows here, in the normal form")
    command.add_argument("--split", type=Path, help="write them into this folder as train, validation and test.jsonl, copies together")
    command.add_argument("--drop-repeated", action="store_true", help="write no row that repeats another: picture, question, answer")
    command.add_argument("--figure", type=Path, metavar="FILE.png", help="draw the histograms")
    command.add_argument("--json", action="store_true")

    command = add("merge", "fold adapters into the base's weights, write a stock folder, load it again and compare")
    command.add_argument("--model", default=TINY_BASE, help="folder or hub name of the base")
    command.add_argument("--adapters", type=Path, required=True)
    command.add_argument("--output", type=Path, required=True, help="a new folder")

    command = add("operators", "compare every part of a model on the device with the CPU, and the attention implementations")
    command.add_argument("--model", default=TINY_BASE, help="folder or hub name of a Qwen2.5-VL")
    command.add_argument("--device", help="npu, cuda or cpu; the first there is by default")
    command.add_argument("--recipe", help="with this recipe's adapters")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    command.add_argument("--precision", choices=PRECISIONS, help="all that the device has by default")

    command = add("benchmark", "measure in one process, the cases taking turns, and write a record")
    command.add_argument("what", choices=sorted(benchmarks), help="check: its speed; oft: its cost; precision: which to train in")
    add_model(command)
    add_data(command)
    command.add_argument("--recipe", default="lora_text_vision", help="for precision")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    command.add_argument("--steps", type=int, default=30, help="for precision: optimizer steps in each")
    command.add_argument("--output", type=Path, help="a folder; data/benchmarks by default")
    command.add_argument("--quick", action="store_true", help="small and few: only to see that it runs")

    command = add("plan", "what a run will need in memory, counted on the real architecture without its weights")
    command.add_argument("--model", default="7B", help="3B, 7B, or a folder or hub name of a Qwen2.5-VL")
    command.add_argument("--recipe", help="which adapters train")
    command.add_argument("--reported", action="store_true", help="the reports' configurations beside the peaks that they give")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    command.add_argument("--batch-size", type=int, help="the recipe's by default")
    command.add_argument("--max-pixels", type=int, default=448 * 448)
    command.add_argument("--text-tokens", type=int, default=64, help="question and answer, without the picture's")
    command.add_argument("--precision", choices=PRECISIONS, default="bf16")
    command.add_argument("--weights", choices=("4bit", "8bit"), help="quantised base weights")
    command.add_argument("--gradient-checkpointing", action="store_true")
    command.add_argument("--attention", choices=("eager", "sdpa", "flash_attention_2"), default="sdpa")
    command.add_argument("--device-gib", type=float, help="the device's memory: also find the largest batch, or what to change")

    command = add("rehearse", "run a training script, unchanged, on the genuine torch_npu over a stand-in for CANN")
    command.add_argument("--chip", default="Ascend910B2", help="what the stand-in says it is")
    command.add_argument("--devices", type=int, default=1)
    command.add_argument("--allow-fallbacks", action="store_true", help="let operators without an NPU kernel run on the CPU")
    command.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, as python -m takes it")
    command.add_argument("script", nargs=argparse.REMAINDER, help="script.py and its arguments")

    command = add("doctor", "say what is installed, whether it fits together, and whether the device computes")
    command.add_argument("--json", action="store_true")
    return parser
