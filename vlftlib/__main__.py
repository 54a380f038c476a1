"""The command line: python -m vlftlib COMMAND; every command says what it takes with --help."""

import ast
import json
import sys
from pathlib import Path

from vlftlib.arguments import build_parser
from vlftlib.devices import get_device

ROOT = Path(__file__).parent.parent
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")


def train(arguments) -> int:
    from vlftlib.devices import platform_policy
    from vlftlib.samples import load_splits
    from vlftlib.trainer import TrainConfig
    from vlftlib.trainer import train as run_training

    recipe = _recipe(arguments)
    device = get_device(arguments.device)
    policy = platform_policy(device, recipe.precision)
    splits = load_splits(arguments.data, arguments.root)
    _report_rejected(splits)
    model = _load(arguments, policy, device)
    processor = _processor(arguments)
    record = run_training(
        model,
        processor,
        recipe,
        splits.parts["train"],
        arguments.output,
        evaluate_on={name: splits.parts[name] for name in ("validation", "test")},
        config=TrainConfig(
            max_steps=arguments.max_steps,
            seed=arguments.seed,
            save_steps=arguments.save_steps,
            max_length=arguments.max_length,
            group_by_length=arguments.group_by_length,
            graph_mode=arguments.graph_mode,
            gradient_checkpointing=arguments.gradient_checkpointing,
            eval_steps=tuple(arguments.eval_steps),
            on_nonfinite=arguments.on_nonfinite,
            tensorboard=arguments.tensorboard,
        ),
        data=splits.describe(),
        metric=splits.metric,
        resume=arguments.resume,
    )
    print(f"{record.name}: {record.outcome}, written to {arguments.output}")
    return 0


def evaluate(arguments) -> int:
    from vlftlib.comparison import evaluate_run
    from vlftlib.devices import platform_policy
    from vlftlib.samples import load_splits

    device = get_device(arguments.device)
    policy = platform_policy(device)
    splits = load_splits(arguments.data, arguments.root)
    _report_rejected(splits)
    record = evaluate_run(
        _load(arguments, policy, device),
        _processor(arguments),
        splits,
        arguments.output,
        policy=policy,
        adapters=arguments.adapters,
        names=arguments.splits,
        batch_size=arguments.batch_size,
    )
    for done in record.evaluations:
        print(f"{done['split']}: {done['examples']} examples, accuracy {done['accuracy']:.1%}, {done['unparsable']} unparsable")
    return 0


def predict(arguments) -> int:
    from vlftlib.adapters import load_adapters
    from vlftlib.devices import platform_policy
    from vlftlib.evaluation import ask
    from vlftlib.images import ImageError

    pictures = []
    for path in arguments.pictures:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix.lower() in PICTURES)
            if not found:
                raise FileNotFoundError(f"{path}: no picture ({', '.join(PICTURES)}) in this folder")
            pictures += found
        else:
            pictures.append(path)
    question = arguments.question or _trained_question(arguments.adapters)
    device = get_device(arguments.device)
    policy = platform_policy(device)
    model = _load(arguments, policy, device)
    if arguments.adapters:
        load_adapters(model, arguments.adapters)
    processor = _processor(arguments)
    failed = 0
    for start in range(0, len(pictures), arguments.batch_size):
        for path, answer in ask(model, processor, pictures[start : start + arguments.batch_size], question):
            if isinstance(answer, ImageError):
                failed += 1
                print(f"{path}: {answer}", file=sys.stderr)
            elif arguments.json:
                print(json.dumps({"image": str(path), "question": question, "answer": answer}, ensure_ascii=False), flush=True)
            else:
                print(answer if len(pictures) == 1 else f"{path}: {answer}", flush=True)
    return 1 if failed else 0


def compare(arguments) -> int:
    from vlftlib.comparison import run_recipes, show_runs
    from vlftlib.figures import FIGURES

    folder = arguments.show
    if folder is None:
        # Checked now, so that a wrong word is found before the first minutes are spent.
        for name in arguments.recipes:
            arguments.recipe = name
            _recipe(arguments)
        shared = ["--model", str(arguments.model), "--data", str(arguments.data)]
        for flag in ("device", "root", "min_pixels", "max_pixels", "fixed_grid", "attention", "weights"):
            if getattr(arguments, flag) is not None:
                shared += [f"--{flag.replace('_', '-')}", str(getattr(arguments, flag))]
        training = [f"--set={pair}" for pair in arguments.set] + ["--seed", str(arguments.seed)]
        training += ["--max-steps", str(arguments.max_steps)] if arguments.max_steps else []
        folder = arguments.output or ROOT / "data" / "runs" / Path(arguments.data).stem
        folder = run_recipes(arguments.recipes, folder, shared=shared, training=training)
    figures = FIGURES if arguments.show and arguments.readme else folder / "figures"
    print(show_runs(folder, figures, arguments.readme))
    return 0


def check(arguments) -> int:
    from vlftlib.check import check_examples
    from vlftlib.duplicates import drop_repeated
    from vlftlib.figures import check_figure, save_figure
    from vlftlib.models import load_processor
    from vlftlib.reading import write_examples
    from vlftlib.samples import load_parts, split_three

    parts = load_parts(arguments.data, arguments.root)
    if len(parts) > 1 and (arguments.write or arguments.split):
        raise ValueError(f"{arguments.data} has {len(parts)} parts: --write and --split take one file")
    sizes = arguments.min_pixels, arguments.max_pixels, arguments.fixed_grid
    report = check_examples(parts, load_processor(arguments.model, *sizes), arguments.max_length)
    print(json.dumps(report.as_dict(), indent=1) if arguments.json else report)
    if arguments.figure:
        save_figure(check_figure(report), arguments.figure.stem, arguments.figure.parent)
    kept = drop_repeated(report.examples, report.duplicates)[0] if arguments.drop_repeated else report.examples
    files = {arguments.write: kept} if arguments.write else {}
    if arguments.split:
        arguments.split.mkdir(parents=True, exist_ok=True)
        files |= {arguments.split / f"{name}.jsonl": part for name, part in split_three(kept, report.duplicates).items()}
    for path, examples in files.items():
        root = Path(parts["all"].root)
        write_examples(examples, path, root)
        hint = "" if path.resolve().parent == root.resolve() else f"; its image paths are relative to {root}: --root {root}"
        print(f"{len(examples):,} rows in {path}{hint}", file=sys.stderr)
    return 1 if report.bad_share > arguments.allowed else 0


def merge(arguments) -> int:
    from vlftlib.stock_folder import write_merged

    checked = write_merged(arguments.model, arguments.adapters, arguments.output)
    print(f"a stock Qwen2.5-VL with the adapters in its weights: {arguments.output}\n{checked}")
    return 0


def operators(arguments) -> int:
    from vlftlib.adapters import apply_recipe
    from vlftlib.devices import platform_policy
    from vlftlib.models import load_model
    from vlftlib.operator_check import check_operators, compare_attention

    recipe = arguments.recipe and _recipe(arguments)
    device = get_device(arguments.device)
    model = load_model(arguments.model)
    attention = compare_attention(model, device, arguments.precision or platform_policy(device).precision)
    if recipe:
        apply_recipe(model, recipe)
    report = check_operators(model, device, arguments.precision and [arguments.precision])
    print(report, attention, sep="\n\n")
    return 1 if report.failures or not attention.recommended else 0


def benchmark(arguments) -> int:
    device = get_device(arguments.device)
    output = arguments.output or ROOT / "data" / "benchmarks"
    print(BENCHMARKS[arguments.what](arguments, device, output))
    return 0


def _benchmark_oft(arguments, device, output):
    from vlftlib.oft_benchmark import measure_oft

    return measure_oft(device=device, output=output, quick=arguments.quick)


def _benchmark_check(arguments, device, output):
    from vlftlib.check_benchmark import measure_check

    return measure_check(device=device, output=output, quick=arguments.quick)


def _benchmark_precision(arguments, device, output):
    from vlftlib.precision import measure_precision
    from vlftlib.samples import load_splits

    return measure_precision(
        lambda policy: _load(arguments, policy, device),
        _processor(arguments),
        _recipe(arguments),
        load_splits(arguments.data, arguments.root).parts["train"],
        device=device,
        output=output,
        steps=4 if arguments.quick else arguments.steps,
    )


def _benchmark_generation(arguments, device, output):
    from vlftlib.generation_benchmark import measure_generation

    return measure_generation(device=device, output=output, quick=arguments.quick)


# Each writes OUTPUT/NAME.json, with a figure where there is one.
BENCHMARKS = {
    "check": _benchmark_check,
    "generation": _benchmark_generation,
    "oft": _benchmark_oft,
    "precision": _benchmark_precision,
}


def plan(arguments) -> int:
    from transformers import AutoConfig

    from vlftlib.models import resolve_source
    from vlftlib.plan import plan_memory
    from vlftlib.plan_reported import compare_reported

    if arguments.reported:
        print(compare_reported())
        return 0
    if arguments.recipe is None:
        raise ValueError("plan needs --recipe NAME, or --reported")
    known = arguments.model in ("3B", "7B")
    found = plan_memory(
        arguments.model if known else AutoConfig.from_pretrained(resolve_source(arguments.model)),
        _recipe(arguments),
        batch_size=arguments.batch_size,
        max_pixels=arguments.max_pixels,
        text_tokens=arguments.text_tokens,
        precision=arguments.precision,
        weights=arguments.weights,
        gradient_checkpointing=arguments.gradient_checkpointing,
        attention=arguments.attention,
        device_bytes=arguments.device_gib and int(arguments.device_gib * 2**30),
    )
    print(found)
    return 0


def rehearse(arguments) -> int:
    from vlftlib.rehearsal import rehearse as run_rehearsal

    options = dict(chip=arguments.chip, devices=arguments.devices, allow_fallbacks=arguments.allow_fallbacks)
    words = arguments.script if arguments.module is None else ["-m", *arguments.module]
    return run_rehearsal(words, **options).returncode


def doctor(arguments) -> int:
    from vlftlib.doctor import diagnose

    found = diagnose()
    print(found.to_json() if arguments.json else found)
    return 1 if found.faults else 0


def _recipe(arguments):
    from vlftlib.recipes import TINY_BASE_OVERRIDES, get_recipe

    overrides = {}
    if _is_tiny_base(arguments.model):
        overrides |= TINY_BASE_OVERRIDES.get(arguments.recipe, {})
    for pair in arguments.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair!r}: write key=value, as learning_rate=1e-4")
        try:
            overrides[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            overrides[key] = value  # a bare word
    if getattr(arguments, "precision", None):
        overrides["precision"] = arguments.precision
    return get_recipe(arguments.recipe, **overrides)


def _is_tiny_base(model) -> bool:
    from vlftlib.models import TINY_BASE

    return Path(model).resolve() == TINY_BASE.resolve()


def _load(arguments, policy, device):
    """The model on its device, with the attention that was asked for or that the platform's policy stands for."""
    from vlftlib.models import load_model

    asked = arguments.attention or policy.attention
    model = load_model(arguments.model, dtype=policy.dtype, device=device, attention=asked, weights=arguments.weights)
    if asked == "auto":
        print(f"attention: {model.config._attn_implementation}, the fastest here that agrees with the CPU")
    return model


def _report_rejected(splits) -> None:
    for rejection in splits.rejected[:5]:
        print(f"rejected: {rejection}", file=sys.stderr)
    if len(splits.rejected) > 5:
        print(f"rejected: {len(splits.rejected)} rows in all", file=sys.stderr)


def _processor(arguments):
    """The processor, its pictures' sizes as asked for, or else as the adapters' run had them."""
    from vlftlib.models import load_processor
    from vlftlib.runs import FILE, load_run

    sizes = {name: getattr(arguments, name) for name in ("min_pixels", "max_pixels", "fixed_grid")}
    adapters = getattr(arguments, "adapters", None)
    if adapters and (record := adapters.resolve().parent / FILE).exists():
        trained = load_run(record).setup.get("processor", {})
        sizes = {name: trained.get(name) if value is None else value for name, value in sizes.items()}
    return load_processor(arguments.model, **sizes)


def _trained_question(adapters: Path | None) -> str:
    """The question that a run was trained on, from the record beside its adapters; the products' without one."""
    from vlftlib.runs import FILE, load_run
    from vlftlib.samples import QUESTION

    if adapters is None or not (adapters.resolve().parent / FILE).exists():
        return QUESTION
    return load_run(adapters.resolve().parent).setup["data"]["question"]


COMMANDS = {
    function.__name__: function
    for function in (train, evaluate, predict, compare, check, merge, operators, benchmark, plan, rehearse, doctor)
}


def main(words: list[str] | None = None) -> int:
    arguments = build_parser(__doc__, BENCHMARKS).parse_args(words)
    try:
        # transformers imports torch_npu where it is installed, so whether that loads is found out first, and said. Two commands
        # also run where torch itself can't be imported.
        if arguments.command not in ("doctor", "rehearse"):
            get_device(getattr(arguments, "device", None))
        return COMMANDS[arguments.command](arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        if arguments.traceback:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
