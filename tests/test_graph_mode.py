"""Graph mode: compilations counted, results unchanged."""

import pytest
import torch
from PIL import Image

from vlftlib import trainer
from vlftlib.adapters import adapter_parameters, apply_recipe
from vlftlib.dataset import VisionLanguageCollator, VisionLanguageDataset
from vlftlib.evaluation import predict
from vlftlib.forms import Example
from vlftlib.graph_mode import TEXT_MULTIPLE, compiled
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.recipes import get_recipe
from vlftlib.trainer import TrainConfig, train

SIZES = [(224, 112), (112, 112), (56, 112), (140, 84), (84, 84), (196, 112)]


class Counting:
    """A backend that compiles nothing and counts the graphs that it is given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.fixture(autouse=True)
def no_graphs_from_before():
    torch._dynamo.reset()


@pytest.fixture
def shapes(tmp_path):
    """A batch for each size of picture, two rows a batch."""
    texts = ["red", "a long answer "]
    examples = []
    for i, size in enumerate(SIZES):
        Image.new("RGB", size, "red").save(tmp_path / f"{i}.png")
        for text in texts:
            user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
            answer = {"role": "assistant", "content": [{"type": "text", "text": text * (i + 1)}]}
            examples.append(Example((str(tmp_path / f"{i}.png"),), [user, answer], "x", i))
    return examples


def count_graphs(examples, fixed_grid, multiple) -> list[int]:
    """Graphs compiled after each batch of one pass of forward and backward."""
    processor = load_processor(TINY_BASE, min_pixels=56 * 56, max_pixels=224 * 112, fixed_grid=fixed_grid)
    model = apply_recipe(load_model(TINY_BASE), get_recipe("lora_text"))
    dataset, collate = VisionLanguageDataset(examples, processor), VisionLanguageCollator(processor, multiple=multiple)
    backend, counts = Counting(), []
    with compiled(model, backend):
        for i in range(0, len(examples), 2):
            batch = collate([dataset[i], dataset[i + 1]])
            batch.pop("row")
            model(**batch, use_cache=False).loss.backward()
            counts.append(backend.graphs)
    return counts


def test_graphs_are_few_with_a_fixed_grid_and_grow_without(shapes):
    few = count_graphs(shapes, "112x112", 128)
    assert few[0] == few[-1] > 0
    two = count_graphs(shapes, "112x112,168x84", 128)
    assert len(set(two)) == 2 and two[-1] <= 2 * two[0]
    growing = count_graphs(shapes, None, 1)
    assert all(after > before for before, after in zip(growing, growing[1:]))


@pytest.mark.parametrize("name", ["lora_text_vision", pytest.param("oft_vision", marks=pytest.mark.slow)])
def test_training_compiled_is_training(name, examples, tmp_path, monkeypatch):
    processor = load_processor(TINY_BASE, fixed_grid="112x112")
    dropout = {"dropout": 0.0} if "lora" in name else {}  # its masks would hang on the padding
    recipe = get_recipe(name, batch_size=4, gradient_accumulation_steps=1, learning_rate=1e-3, **dropout)
    backend, runs = Counting(), []
    policy = trainer.platform_policy
    monkeypatch.setattr(trainer, "platform_policy", lambda *words: policy(*words, workers=0, graph_backend=backend))
    monkeypatch.setattr("vlftlib.devices.PlatformPolicy.as_dict", lambda self: {})  # the counting backend is no plain value
    for graph_mode in (False, True):
        model = load_model(TINY_BASE)
        config = TrainConfig(max_steps=3, graph_mode=graph_mode, eval_steps=(1,))
        parts = {"validation": examples[:2]}
        run = train(model, processor, recipe, examples, tmp_path / str(graph_mode), config=config, evaluate_on=parts)
        assert predict(model, processor, examples[:1])
        runs.append((run, [item.parameter for item in adapter_parameters(model)]))
    (plain, parameters), (graphs, compiled_parameters) = runs
    assert backend.graphs > 0 and graphs.setup["processor"]["fixed_grid"] == "112x112"
    assert [e["loss"] for e in graphs.history] == pytest.approx([e["loss"] for e in plain.history], abs=1e-4)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(parameters, compiled_parameters))
    assert graphs.evaluation("validation")["accuracy"] == plain.evaluation("validation")["accuracy"]


def test_what_would_compile_without_end_is_refused(base, processor, examples, tmp_path):
    with pytest.raises(ValueError, match="graph_mode needs a fixed_grid"):
        train(base, processor, get_recipe("oft_vision"), examples, tmp_path, config=TrainConfig(graph_mode=True))
    with pytest.raises(RuntimeError, match="no backend 'npu' here, it has .*inductor"), compiled(base, "npu"):
        pass
    assert TEXT_MULTIPLE == 64
