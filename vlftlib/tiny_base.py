"""The embedded base: a real Qwen2.5-VL of 1.6 million parameters, trained here from nothing (`make base`).

It has every part of the 7B model (fused vision qkv, windowed and full vision attention, merger, M-RoPE, grouped-query
attention) in small, and it reads one kind of picture: products from the catalogue (`samples`).

A curriculum makes the product number learnable: the number alone on a centred product, then on a turned and moved one,
then all attributes, with every third batch still the number alone. All at once from the start, colours and defects are
learnt and the number stays at chance.
"""

import argparse
import datetime
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm
from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from vlftlib.models import TINY_BASE, ImageTextProcessor, save_processor
from vlftlib.samples import (
    CELL_QUESTION,
    COLOURS,
    DEFECTS,
    LETTERS,
    NUMBER_QUESTION,
    QUESTION,
    Product,
    draw_product,
    random_product,
)

VOCABULARY = 512  # rows of the embedding; the tokenizer uses about 400
MAX_LENGTH = 2048
# Every picture is resized to about 112 x 112, 16 image tokens. The processor rounds sides down to multiples of 28, so the
# upper limit is a little higher: else a square of 300 px would come out as 84 x 84.
MIN_PIXELS, MAX_PIXELS = 112 * 112, 114 * 114
SPECIAL_TOKENS = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> "
    "<|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
# Renders the same text as the template that comes with Qwen2.5-VL, for system, user and assistant turns of text and images.
CHAT_TEMPLATE = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- else -%}
{{- raise_exception('content of type ' + part.type + ': use image or text') -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
# (all attributes or the number alone, pose, steps, peak learning rate)
CURRICULUM = ((False, 0.0, 1500, 1e-3), (False, 1.0, 2500, 1e-3), (True, 1.0, 3000, 1e-3), (True, 1.0, 2000, 3e-4))
BATCH_SIZE = 32
TRAINING_SEED, PROBE_SEED = 1, 2


def build_tokenizer() -> Qwen2Tokenizer:
    """A small byte-level BPE tokenizer in Qwen's form, its merges learnt from the samples' questions and answers."""
    texts = [Product(colour, defect, letter).answer for colour in COLOURS for defect in DEFECTS for letter in LETTERS]
    texts += ["You are a helpful assistant.", "system\n", "user\n", "assistant\n", QUESTION, NUMBER_QUESTION] * 40
    texts += [CELL_QUESTION, "cell: mono, grade: 1/3", "cell: poly, grade: 0"] * 40
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    bpe.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = VOCABULARY - len(SPECIAL_TOKENS)
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=room, initial_alphabet=alphabet, show_progress=False))
    learnt = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=learnt["vocab"], merges=[tuple(pair) for pair in learnt["merges"]], eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL_TOKENS})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = MAX_LENGTH
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL's architecture in small, with fresh weights from seed 0."""
    token = tokenizer.convert_tokens_to_ids
    text = dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        bos_token_id=token("<|endoftext|>"),
        eos_token_id=token("<|im_end|>"),
        pad_token_id=token("<|endoftext|>"),
        tie_word_embeddings=True,
    )
    vision = dict(
        depth=4,
        hidden_size=128,
        intermediate_size=256,
        num_heads=4,
        out_hidden_size=128,
        patch_size=14,
        spatial_merge_size=2,
        temporal_patch_size=2,
        window_size=56,
        fullatt_block_indexes=[1, 3],
    )
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=text["bos_token_id"],
        eos_token_id=text["eos_token_id"],
        pad_token_id=text["pad_token_id"],
    )
    return model


class CatalogueBatches(IterableDataset):
    """Endless training batches of fresh catalogue pictures, through the real processor."""

    def __init__(self, processor, rng: random.Random, everything: bool, pose: float):
        self.processor, self.rng, self.everything, self.pose = processor, rng, everything, pose

    def __iter__(self):
        count = 0
        while True:
            yield self.batch(BATCH_SIZE, self.everything and count % 3 > 0)
            count += 1

    def batch(self, size: int, everything: bool) -> dict[str, torch.Tensor]:
        products = [random_product(self.rng) for _ in range(size)]
        question = QUESTION if everything else NUMBER_QUESTION
        user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}
        texts, answers = [], []
        for product in products:
            answer = product.answer if everything else f"number: {product.number}"
            turns = [user, {"role": "assistant", "content": answer}]
            texts.append(self.processor.tokenizer.apply_chat_template(turns, tokenize=False))
            answers.append(len(self.processor.tokenizer(answer + "<|im_end|>\n").input_ids))
        images = [draw_product(product, self.rng, self.pose) for product in products]
        inputs = dict(self.processor(images=images, text=texts, padding=True, padding_side="right", return_tensors="pt"))
        lengths = inputs["attention_mask"].sum(1)
        position = torch.arange(inputs["input_ids"].shape[1])
        # The answer and its <|im_end|> are learnt; the line end after it, the prompt and the padding are not.
        learnt = (position >= (lengths - torch.tensor(answers))[:, None]) & (position < (lengths - 1)[:, None])
        inputs["labels"] = inputs["input_ids"].masked_fill(~learnt, -100)
        return inputs


@torch.no_grad()
def probe(model, processor, pose: float, everything: bool, size: int = 256) -> float:
    """The share of fresh catalogue pictures whose answer is right throughout, given each token's right predecessors."""
    inputs = CatalogueBatches(processor, random.Random(PROBE_SEED), everything, pose).batch(size, everything)
    labels = inputs.pop("labels")[:, 1:]
    model.eval()
    wrong = (model(**inputs).logits[:, :-1].argmax(-1) != labels) & (labels != -100)
    model.train()
    return 1 - wrong.any(1).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded base from nothing; about 90 minutes on two cores.")
    parser.add_argument("--output", type=Path, default=TINY_BASE)
    parser.add_argument("--shorten", type=float, default=1, help="divide every stage's steps by this, to try the script")
    arguments = parser.parse_args()
    tokenizer = build_tokenizer()
    images = Qwen2VLImageProcessorPil(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    processor = ImageTextProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)
    model = build_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02, betas=(0.9, 0.99))
    rng, began, stages, step = random.Random(TRAINING_SEED), time.time(), [], 0
    for everything, pose, steps, rate in CURRICULUM:
        steps = int(steps / arguments.shorten)
        batches = iter(DataLoader(CatalogueBatches(processor, rng, everything, pose), batch_size=None, num_workers=1))
        rng.seed(rng.random())  # the worker drew from a copy
        decay = everything and rate < 1e-3
        for k in (bar := tqdm(range(steps), desc=f"{'all' if everything else 'number'}, pose {pose:g}", mininterval=5)):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1, step / 100) * (1 - k / steps if decay else 1)
            loss = model(**next(batches)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if k % 250 == 249 or k == steps - 1:
                right = {"number": probe(model, processor, pose, False)}
                if everything:
                    right["all"] = probe(model, processor, pose, True)
                bar.write(f"{time.time() - began:.0f} s, step {step}: {right}")
        stages.append(dict(everything=everything, pose=pose, steps=steps, learning_rate=rate, right=right))
        model.save_pretrained(arguments.output)
    save_processor(processor, arguments.output)
    record = dict(
        command="make base",
        date=datetime.date.today().isoformat(),
        torch=torch.__version__,
        parameters=sum(p.numel() for p in model.parameters()),
        batch_size=BATCH_SIZE,
        seeds=dict(weights=0, training=TRAINING_SEED, probe=PROBE_SEED),
        stages=stages,
        hours=round((time.time() - began) / 3600, 2),
    )
    (arguments.output / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
