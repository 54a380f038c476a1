"""stock_folder: a merged folder has a published folder's files, loads by plain classes, and isn't there unless it is right."""

import json

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, GenerationConfig

from vlftlib import stock_folder
from vlftlib.adapters import adapter_parameters, apply_recipe, load_adapters, save_adapters
from vlftlib.dataset import VisionLanguageCollator, VisionLanguageDataset
from vlftlib.images import load_image
from vlftlib.models import TINY_BASE, load_model, load_processor
from vlftlib.recipes import get_recipe
from vlftlib.stock_folder import STOCK_FILES, write_merged


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = apply_recipe(load_model(TINY_BASE), get_recipe("hybrid_staged"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for item in adapter_parameters(model):
            item.parameter.add_(0.03 * torch.randn(item.parameter.shape, generator=generator))
    return save_adapters(model, tmp_path_factory.mktemp("saved") / "adapters")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_folder_is_a_stock_one(saved, processor, examples, tmp_path, dtype):
    checked = write_merged(TINY_BASE, saved, tmp_path / "merged", dtype=dtype)
    assert checked.passed and [path.name for path in tmp_path.iterdir()] == ["merged"]
    folder = tmp_path / "merged"
    assert {path.name for path in folder.iterdir()} == {*STOCK_FILES, "model.safetensors"}
    for name, words in (("preprocessor_config", "image_processor"), ("video_preprocessor_config", "video_processor")):
        content = json.loads((folder / f"{name}.json").read_text())
        assert content["processor_class"] == "Qwen2_5_VLProcessor" and content[f"{words}_type"].startswith("Qwen2VL")
    assert (folder / "chat_template.jinja").read_text() == (TINY_BASE / "chat_template.jinja").read_text()
    assert GenerationConfig.from_pretrained(folder).to_diff_dict() == GenerationConfig.from_pretrained(TINY_BASE).to_diff_dict()

    plain = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval()
    assert plain.dtype == dtype and plain.state_dict().keys() == load_model(TINY_BASE).state_dict().keys()
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == processor.tokenizer.get_vocab()
    batch = VisionLanguageCollator(load_processor(folder))([VisionLanguageDataset(examples, processor)[i] for i in range(2)])
    batch.pop("row")
    adapted = load_adapters(load_model(TINY_BASE, dtype=dtype), saved)
    with torch.no_grad():
        want, got = adapted(**batch).logits, plain(**batch).logits
        assert torch.equal(load_model(folder, dtype="auto")(**batch).logits, got)
    assert (got - want).abs().max() < {torch.float32: 1e-4, torch.bfloat16: 1}[dtype]
    with pytest.raises(FileExistsError, match="choose a new folder"):
        write_merged(TINY_BASE, saved, folder)


def test_plain_transformers_loads_all_of_it_where_torchvision_is(saved, processor, examples, tmp_path):
    pytest.importorskip("torchvision", reason="transformers' own Qwen2.5-VL processor needs torchvision")
    write_merged(TINY_BASE, saved, tmp_path / "merged")
    plain = AutoProcessor.from_pretrained(tmp_path / "merged")
    assert type(plain).__name__ == "Qwen2_5_VLProcessor" and type(plain.video_processor).__name__ == "Qwen2VLVideoProcessor"
    picture = load_image(examples[0].images[0])
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}]
    text = processor.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert plain.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) == text
    want, got = (p(images=[picture], text=[text], return_tensors="pt") for p in (processor, plain))
    assert torch.equal(got["input_ids"], want["input_ids"]) and torch.equal(got["image_grid_thw"], want["image_grid_thw"])
    assert (got["pixel_values"] - want["pixel_values"]).abs().mean() < 0.02  # torchvision's resizing is another


def test_a_folder_that_is_wrong_is_not_kept(saved, tmp_path, monkeypatch):
    save_processor, load = stock_folder.save_processor, stock_folder.load_model

    def without_template(processor, folder):
        save_processor(processor, folder)
        (folder / "chat_template.jinja").unlink()

    def other_pixels(processor, folder):
        save_processor(processor, folder)
        text = (folder / "preprocessor_config.json").read_text()
        (folder / "preprocessor_config.json").write_text(text.replace("0.48145466", "0.5"))

    def forgetful(source, **options):
        model = load(source, **options)
        if source != TINY_BASE:
            with torch.no_grad():
                model.model.visual.merger.mlp[0].weight.mul_(1.01)
        return model

    for name, broken, message in (
        ("save_processor", without_template, "a stock folder has chat_template.jinja too"),
        ("save_processor", other_pixels, "the written processor gives another pixel_values"),
        ("load_model", forgetful, "NOT within rounding"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(stock_folder, name, broken)
            with pytest.raises(RuntimeError, match=message):
                write_merged(TINY_BASE, saved, tmp_path / "merged")
        assert list(tmp_path.iterdir()) == []
