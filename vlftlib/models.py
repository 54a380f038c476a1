"""Load and save a Qwen2.5-VL model and its processor, from a folder or a hub name.

The processor is Qwen2.5-VL's own without its video part: that part alone needs torchvision, and without it pixels are
computed by PIL on every platform alike. What is saved names the stock class, so that plain transformers loads it too.
"""

import hashlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vlftlib.grids import FixedGrid, parse_grid

TINY_BASE = Path(__file__).parent.parent / "data" / "tiny-base"
MODEL_TYPE = "qwen2_5_vl"


class ImageTextProcessor(Qwen2_5_VLProcessor):
    """`Qwen2_5_VLProcessor` for images and text; refuses videos by name. `fixed_grid` is read by the data set."""

    fixed_grid: FixedGrid | None = None

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super(Qwen2_5_VLProcessor, self).__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)

    def __call__(self, images=None, text=None, videos=None, **kwargs):
        if videos is not None:
            raise ValueError("video input is not supported: give the frames as images")
        return super().__call__(images=images, text=text, **kwargs)


def load_model(
    name_or_path: str | os.PathLike,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    attention: str = "sdpa",
    weights: Literal["4bit", "8bit"] | None = None,
) -> Qwen2_5_VLForConditionalGeneration:
    """Load a Qwen2.5-VL model with its weights.

    Args:
        name_or_path: a folder as `save_pretrained` writes it, or a name on the hub.
        dtype: of the weights; with quantised ones, of what isn't quantised and of the computation.
        device: where the weights go.
        attention: "eager", "sdpa" or "flash_attention_2", for both towers; "auto" tries them on the device and takes the
            fastest that agrees with the CPU (`operator_check.choose_attention`).
        weights: both towers' linear layers in "4bit" (NF4) or "8bit" (LLM.int8) by bitsandbytes, for adapters to train on;
            None keeps the folder's own.

    Raises:
        FileNotFoundError: the folder or the hub name can't be read.
        ValueError: it is another kind of model, or quantised already and `weights` is given.
        ModuleNotFoundError: `weights` is given and bitsandbytes isn't installed.
        RuntimeError: attention is "auto", and none agrees with the CPU.
    """
    if weights not in (None, "4bit", "8bit"):
        raise ValueError(f"weights {weights!r}: must be '4bit', '8bit' or None")
    source = resolve_source(name_or_path)
    config = AutoConfig.from_pretrained(source)
    if config.model_type != MODEL_TYPE:
        raise ValueError(f"{name_or_path}: model_type is {config.model_type!r} where {MODEL_TYPE!r} is needed")
    options = dict(dtype=dtype, attn_implementation="eager" if attention == "auto" else attention)
    if weights or hasattr(config, "quantization_config"):
        quantization = _quantization(config, weights, dtype, name_or_path)
        options |= dict(device_map={"": torch.device(device)}, quantization_config=quantization)
        model = keep_layout(Qwen2_5_VLForConditionalGeneration.from_pretrained(source, **options))
    else:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(source, **options).to(device)
    if attention == "auto":
        from vlftlib.operator_check import choose_attention

        choose_attention(model, attention)
    return model.eval()


def _quantization(config, weights: str | None, dtype: torch.dtype | str, name) -> BitsAndBytesConfig | None:
    """How to quantise on loading; None where the folder's weights are quantised already."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModuleNotFoundError(f"{weights or 'quantised'} weights need bitsandbytes: pip install 'vlftlib[quant]'")
    if weights is None:
        return None
    if hasattr(config, "quantization_config"):
        raise ValueError(f"{name}: its weights are quantised already: load it without weights={weights!r}")
    if weights == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    dtype = config.dtype or torch.float32 if dtype == "auto" else dtype
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def keep_layout(model: torch.nn.Module) -> torch.nn.Module:
    """Forbid bitsandbytes to repack 4-bit weights, in place, and pack back what it has repacked.

    On CPUs with bf16 instructions their first inference does so. Afterwards no gradient passes the layer, so that an evaluation
    would end the training of all that lies before it; and the scales stay rounded to bf16.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False
            module.state_dict()  # packs back
    return model


def quantized_weights(model: torch.nn.Module) -> str | None:
    """ "4bit", "8bit" or None, as `load_model` takes it."""
    bits = ("4bit", "8bit")
    return next((word for word in bits if getattr(model, f"is_loaded_in_{word}", False)), None)


def load_processor(
    name_or_path: str | os.PathLike,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    fixed_grid: str | None = None,
) -> ImageTextProcessor:
    """Load tokenizer, chat template and image processor.

    Args:
        name_or_path: a model's folder or hub name.
        min_pixels: smaller pictures are enlarged to at least this many pixels; None keeps the model's own value.
        max_pixels: larger pictures are shrunk to at most this many pixels; None keeps the model's own value.
        fixed_grid: sizes in px that every picture is brought to, as "448x448" or "448x448,560x336", see `grids`; the same in
            training and evaluation, as all of this.

    Raises:
        FileNotFoundError: the folder or the hub name can't be read.
        ValueError: min_pixels is above max_pixels, a fixed_grid that doesn't fit, or the tokenizer has no chat template.
    """
    source = resolve_source(name_or_path)
    limits = {key: value for key, value in (("min_pixels", min_pixels), ("max_pixels", max_pixels)) if value is not None}
    images = Qwen2VLImageProcessorPil.from_pretrained(source, **limits)
    if images.size["shortest_edge"] > images.size["longest_edge"]:
        raise ValueError(f"min_pixels {images.size['shortest_edge']} is above max_pixels {images.size['longest_edge']}")
    tokenizer = AutoTokenizer.from_pretrained(source)
    template = tokenizer.chat_template or _legacy_chat_template(source)
    if template is None:
        raise ValueError(f"{name_or_path}: no chat template in the tokenizer's files: copy those of the published model")
    tokenizer.chat_template = template
    processor = ImageTextProcessor(images, tokenizer, chat_template=template)
    processor.fixed_grid = fixed_grid and parse_grid(fixed_grid, images)
    return processor


def resolve_source(name_or_path: str | os.PathLike) -> str:
    """The folder or hub name that transformers is to read; tells a mistyped folder from a hub name.

    Raises:
        FileNotFoundError: it looks like a folder and has no config.json.
    """
    path = Path(name_or_path)
    looks_local = path.is_absolute() or str(name_or_path).startswith(".") or path.exists() or len(path.parts) != 2
    if looks_local and not (path / "config.json").is_file():
        raise FileNotFoundError(f"model {str(name_or_path)!r}: no such folder with a config.json (the tiny base: {TINY_BASE})")
    return str(name_or_path)


def _legacy_chat_template(source: str) -> str | None:
    """Folders saved before transformers 4.43 keep the template in chat_template.json."""
    file = Path(source) / "chat_template.json"
    return json.loads(file.read_text())["chat_template"] if file.is_file() else None


def save_processor(processor: Qwen2_5_VLProcessor, folder: str | os.PathLike) -> None:
    """Write tokenizer, chat template, image and video processor configurations as a stock Qwen2.5-VL folder has them."""
    folder = Path(folder)
    processor.tokenizer.save_pretrained(folder)
    images = json.loads(processor.image_processor.to_json_string())
    images = {key: value for key, value in images.items() if key not in ("image_processor_type", "processor_class")}
    stock = {"processor_class": "Qwen2_5_VLProcessor"}
    for file, content in {
        "preprocessor_config.json": images | stock | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": images | stock | {"video_processor_type": "Qwen2VLVideoProcessor"},
    }.items():
        (folder / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def full_size_config(size: str) -> Qwen2_5_VLConfig:
    """The published architecture of the "3B" or "7B" model, for counting and planning without its weights.

    Source: config.json of Qwen/Qwen2.5-VL-3B-Instruct and Qwen/Qwen2.5-VL-7B-Instruct.
    """
    sizes = {
        "3B": dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, vocab_size=151936),
        "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, vocab_size=152064),
    }
    if size not in sizes:
        raise ValueError(f"size {size!r}: {' or '.join(sizes)}")
    text = sizes[size]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    return Qwen2_5_VLConfig(
        text_config=text
        | dict(num_key_value_heads=2 if size == "3B" else 4, max_position_embeddings=128000, rope_parameters=rope)
        | dict(tie_word_embeddings=size == "3B"),
        vision_config=dict(
            depth=32,
            hidden_size=1280,
            intermediate_size=3420,
            num_heads=16,
            out_hidden_size=text["hidden_size"],
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
            window_size=112,
            fullatt_block_indexes=[7, 15, 23, 31],
        ),
        tie_word_embeddings=size == "3B",
    )


def empty_model(config: Qwen2_5_VLConfig) -> Qwen2_5_VLForConditionalGeneration:
    """The model of a configuration on the meta device: every module and shape, no memory."""
    with torch.device("meta"):
        return Qwen2_5_VLForConditionalGeneration(config)


def hash_model(model: torch.nn.Module) -> str:
    """Which weights a model was loaded from, whatever its dtype and device: 16 hexadecimal digits, or a hub commit.

    For a folder: SHA-256 over every weight file's size, header (names, shapes, places) and 64 blocks of 4 KiB spread over it;
    a model that never had a folder is told by its configuration.
    """
    source = Path(model.config._name_or_path or "-")
    files = sorted(source.glob("*.safetensors"))
    if not files:
        if commit := getattr(model.config, "_commit_hash", None):
            return commit
        return hashlib.sha256(model.config.to_json_string().encode()).hexdigest()[:16]
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")  # of the safetensors header
            digest.update(f"{path.name} {size}".encode() + file.read(length))
            for k in range(64):
                file.seek(k * size // 64)
                digest.update(file.read(4096))
    return digest.hexdigest()[:16]
