import json
import shutil

import pytest
import torch
from PIL import Image

from vlftlib.models import TINY_BASE, empty_model, full_size_config, hash_model, load_model, load_processor, save_processor
from vlftlib.tiny_base import build_model, build_tokenizer


def test_the_embedded_base_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in TINY_BASE.iterdir()}
    assert sum(files.values()) < 8e6
    assert {"model.safetensors", "tokenizer.json", "preprocessor_config.json", "video_preprocessor_config.json"} <= files.keys()
    record = json.loads((TINY_BASE / "training.json").read_text())
    assert 1e6 < record["parameters"] < 2e6 and record["stages"][-1]["right"]["all"] > 0.9


def test_the_architecture_is_the_real_ones(base):
    names = {name for name, _ in base.named_modules()}
    full = {name for name, _ in empty_model(full_size_config("3B")).named_modules()}
    assert names <= full


@pytest.mark.parametrize("size, billions", [("3B", 3.75), ("7B", 8.29)])
def test_full_sizes(size, billions):
    assert sum(p.numel() for p in empty_model(full_size_config(size)).parameters()) / 1e9 == pytest.approx(billions, abs=0.01)
    with pytest.raises(ValueError, match="3B or 7B"):
        full_size_config("72B")


def test_tokenizer_is_made_the_same_again(processor):
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Größe 17 µm, 颜色?<|im_end|>\n"
    made = build_tokenizer()
    assert made(text).input_ids == processor.tokenizer(text).input_ids
    assert made.decode(made(text).input_ids) == text
    assert len(made) <= build_model(made).config.text_config.vocab_size


def test_processor_survives_saving_and_names_the_stock_classes(processor, tmp_path):
    save_processor(processor, tmp_path)
    shutil.copy(TINY_BASE / "config.json", tmp_path)
    stored = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert (stored["processor_class"], stored["image_processor_type"]) == ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor")
    again, picture = load_processor(tmp_path), Image.new("RGB", (300, 200), "red")
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hi"}]}]
    one, two = (
        p(images=[picture], text=[p.apply_chat_template(turn, tokenize=False)], return_tensors="pt") for p in (processor, again)
    )
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("side", [100, 112, 224, 300, 448, 1000, 3000])
def test_squares_of_any_size_have_the_bases_grid(side, processor):
    assert processor.image_processor([Image.new("RGB", (side, side))], return_tensors="pt")["image_grid_thw"].tolist() == [[1, 8, 8]]


def test_limits_on_pixels():
    processor = load_processor(TINY_BASE, min_pixels=56 * 56, max_pixels=56 * 56)
    grid = processor.image_processor([Image.new("RGB", (448, 448))], return_tensors="pt")["image_grid_thw"]
    assert grid.tolist() == [[1, 4, 4]]
    with pytest.raises(ValueError, match="min_pixels 999999 is above max_pixels"):
        load_processor(TINY_BASE, min_pixels=999999)


def test_videos_are_refused_by_name(processor):
    with pytest.raises(ValueError, match="video input is not supported"):
        processor(text=["x"], videos=[[Image.new("RGB", (56, 56))]])


@pytest.mark.parametrize("name", ["/missing/folder", "./missing", "missing", "a/b/c"])
def test_a_missing_folder_is_named(name):
    for load in (load_model, load_processor):
        with pytest.raises(FileNotFoundError, match="no such folder with a config.json"):
            load(name)


def test_another_kind_of_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match="model_type is 'qwen2' where 'qwen2_5_vl' is needed"):
        load_model(tmp_path)


def test_template_renders_system_and_generation(processor):
    render = processor.tokenizer.apply_chat_template
    own = render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], tokenize=False, add_generation_prompt=True)
    assert own == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert render([{"role": "user", "content": "U"}], tokenize=False).startswith("<|im_start|>system\nYou are a helpful assistant.")


def test_hash_tells_weights_apart_and_not_dtypes(base, tmp_path):
    shutil.copytree(TINY_BASE, tmp_path / "same")
    same, half = load_model(tmp_path / "same"), load_model(TINY_BASE, dtype=torch.bfloat16)
    assert hash_model(base) == hash_model(same) == hash_model(half)
    with torch.no_grad():
        same.model.visual.merger.mlp[0].weight.neg_()
    same.save_pretrained(tmp_path / "other")
    assert hash_model(load_model(tmp_path / "other")) != hash_model(base)
    assert len(hash_model(build_model(build_tokenizer()))) == 16
