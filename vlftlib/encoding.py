"""Conversations as tokens, and labels on the answers alone.

Unusual here: the chat template never sees a user's text. It is rendered once for each shape of conversation with marks in
place of the texts, and cut at the marks; so it is known which tokens come from the template and which from whom, whatever
the texts say. Texts are then encoded with special tokens switched off: `<|im_end|>` or `<|image_pad|>` typed by a user is
text. Where no text holds such a token, the tokens are those of the stock processor.
"""

import re
from collections.abc import Sequence

from vlftlib.forms import Example, RowError

IGNORED = -100  # what torch's cross entropy leaves out
MAX_PLANS = 1000  # shapes of conversations; a data set of long ones may have as many as rows
# Private-use characters around turn and part, or turn and "end": no template has them, and none trims or changes them.
MARK = re.compile("\ue000(?P<turn>\\d+)\\.(?P<part>\\d+|end)\ue001")


class ChatEncoder:
    """Turn conversations into tokens and labels by a processor's chat template.

    Args:
        processor: has `tokenizer`, `image_processor` and `chat_template` (its own, or its tokenizer's).
    """

    def __init__(self, processor):
        self.tokenizer = processor.tokenizer
        self.template = processor.chat_template or self.tokenizer.chat_template
        self.image_token_id = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._special = {token.content: i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        self._pieces = re.compile("|".join([MARK.pattern, *map(re.escape, self._special)]))
        self._plans = {}

    def encode(self, example: Example, image_tokens: Sequence[int], prompt: bool = False) -> tuple[list[int], list[int]]:
        """Tokens and labels of one example.

        Args:
            example: what to encode.
            image_tokens: the number of tokens of each of its pictures.
            prompt: begin an assistant turn at the end, for generation.

        Returns:
            Token ids, and labels of the same length: -100 except on learnt answers and their end tokens.

        Raises:
            RowError: a text can't be encoded, or the pictures don't match their places.
        """
        plan, runs = self._prepare(example, image_tokens, prompt)
        try:
            encoded = iter(self._encode_texts(runs))
        except (TypeError, UnicodeEncodeError) as error:
            raise RowError("text can't be encoded", str(error)[:80]) from None
        ids, labels, counts = [], [], iter(image_tokens)
        for run, learnt in plan:
            if run == self.image_token_id:
                new = [run] * next(counts)
            else:
                new = [run] if isinstance(run, int) else next(encoded)
            ids += new
            labels += new if learnt else [IGNORED] * len(new)
        return ids, labels

    def count(self, examples: Sequence[Example], image_tokens: Sequence[Sequence[int]]) -> list[tuple[int, int] | RowError]:
        """Tokens and learnt tokens of many examples; the tokenizer encodes their texts together, on all cores, each text once.

        Returns:
            For each example its numbers, or why it has none.
        """
        prepared, texts = [], []
        for example, counts in zip(examples, image_tokens):
            try:
                plan, runs = self._prepare(example, counts)
                prepared.append((plan, len(texts)))
                texts += runs
            except RowError as error:
                prepared.append(error)
        try:
            unique = list(dict.fromkeys(texts))  # the template's are in every row, questions in many
            length_of = dict(zip(unique, map(len, self._encode_texts(unique))))
        except (TypeError, UnicodeEncodeError):
            if len(examples) == 1:
                return [RowError("text can't be encoded")]
            return [found for pair in zip(examples, image_tokens) for found in self.count(*([one] for one in pair))]
        found = []
        for entry, counts in zip(prepared, image_tokens):
            if isinstance(entry, RowError):
                found.append(entry)
                continue
            (plan, place), images, total, learnt_total = entry, iter(counts), 0, 0
            for run, learnt in plan:
                if isinstance(run, int):
                    new = next(images) if run == self.image_token_id else 1
                else:
                    new, place = length_of[texts[place]], place + 1
                total += new
                learnt_total += new * learnt
            found.append((total, learnt_total))
        return found

    def _prepare(self, example: Example, image_tokens: Sequence[int], prompt: bool = False) -> tuple[list, list[str]]:
        """The plan of an example's shape, and the texts to encode for it."""
        messages = example.messages
        shape = tuple((m["role"], m.get("loss", True), tuple(part["type"] for part in m["content"])) for m in messages)
        places = sum(kinds.count("image") for _, _, kinds in shape)
        if places != len(image_tokens):
            raise RowError("images and places differ", f"{len(image_tokens)} images, {places} places")
        if (shape, prompt) not in self._plans:
            if len(self._plans) == MAX_PLANS:
                self._plans.clear()
            self._plans[shape, prompt] = self._plan(shape, prompt)
        plan = self._plans[shape, prompt]
        return plan, [
            "".join(p if isinstance(p, str) else messages[p[0]]["content"][p[1]]["text"] for p in run)
            for run, _ in plan
            if not isinstance(run, int)
        ]

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        options = dict(add_special_tokens=False, split_special_tokens=True, return_attention_mask=False)
        return self.tokenizer(texts, **options).input_ids if texts else []

    def _plan(self, shape: tuple, prompt: bool) -> list[tuple[object, bool]]:
        """Runs in order: a special token's id, or a list of template texts and (turn, part) places; and if it is learnt."""
        conversation = []
        for turn, (role, _, kinds) in enumerate(shape):
            content = [
                {"type": "text", "text": f"\ue000{turn}.{part}\ue001"} if kind == "text" else {"type": "image"}
                for part, kind in enumerate(kinds)
            ]
            content.append({"type": "text", "text": f"\ue000{turn}.end\ue001"})
            conversation.append({"role": role, "content": content})
        text = self.tokenizer.apply_chat_template(
            conversation, chat_template=self.template, tokenize=False, add_generation_prompt=prompt
        )
        expected = [part["text"] for turn in conversation for part in turn["content"] if part["type"] == "text"]
        if [mark.group() for mark in MARK.finditer(text)] != expected:
            raise ValueError("the chat template leaves out, repeats or reorders turns: it can't be trained on")
        plan, answer_ends, owner = [], False, None
        for piece in self._split(text):
            if isinstance(piece, int):
                plan.append((piece, answer_ends))  # the end token is learnt; the line end after it is not
                answer_ends, owner = False, None
                continue
            turn = None
            if not isinstance(piece, str):
                turn, part = piece
                role, learnt, _ = shape[turn]
                if part is None:
                    answer_ends = role == "assistant" and learnt
                    continue
                turn = turn if role == "assistant" else None
            # Neighbouring texts are encoded together, as the stock processor does; but an answer by itself, since
            # generation begins with fresh tokens after the template's text.
            if plan and not isinstance(plan[-1][0], int) and turn == owner:
                plan[-1][0].append(piece)
            else:
                plan.append(([piece], turn is not None and learnt))
            owner = turn
        return plan

    def _split(self, text: str) -> list[int | str | tuple[int, int | None]]:
        """The template's text as special tokens' ids, texts, and marks: (turn, part), or (turn, None) at a turn's end."""
        pieces, place = [], 0
        for match in self._pieces.finditer(text):
            if match.start() > place:
                pieces.append(text[place : match.start()])
            turn, part = match["turn"], match["part"]
            pieces.append(self._special[match.group()] if turn is None else (int(turn), None if part == "end" else int(part)))
            place = match.end()
        return pieces + [text[place:]] if place < len(text) else pieces
