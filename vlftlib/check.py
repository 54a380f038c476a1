"""One report on a data set before it is trained on: what is used, what isn't and why, how long the rows are, what repeats.

Every picture is decoded once, on all cores, and none is kept.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm.auto import tqdm

from vlftlib.dataset import ChatEncoder, count_image_tokens
from vlftlib.duplicates import Duplicates, find_duplicates, scan_pictures
from vlftlib.evaluation import parse_answer
from vlftlib.forms import Example, Rejection, RowError
from vlftlib.reading import LoadedExamples

BINS, BAR = 8, 40
FEW_VALUES = 20  # an attribute with more values than this is no class, but a name or a number


@dataclass(frozen=True)
class CheckReport:
    """What `check_examples` found; print it, or take `as_dict()`."""

    examples: list[Example]  # those that can be trained on
    rejected: list[Rejection]
    notes: Counter
    tokens: list[int]  # a row
    learnt_tokens: list[int]  # a row
    sizes: list[tuple[int, int]]  # width and height in px, a picture
    duplicates: Duplicates | None
    attributes: dict[str, Counter] = field(default_factory=dict)
    slowest: list[tuple[float, str]] = field(default_factory=list)  # seconds and "file:line picture"

    @property
    def bad_share(self) -> float:
        """Rejected rows over all rows; a data set without rows is all bad."""
        total = len(self.examples) + len(self.rejected)
        return len(self.rejected) / total if total else 1.0

    @property
    def verdict(self) -> str:
        if not self.examples:
            return "unusable: no row can be trained on"
        troubles = []
        if self.rejected:
            troubles.append(f"{self.bad_share:.1%} of the rows are rejected")
        if self.duplicates and self.duplicates.conflicts:
            troubles.append(f"{len(self.duplicates.conflicts)} label conflicts")
        if self.duplicates and self.duplicates.repeated:
            troubles.append(f"{sum(len(rows) - 1 for rows in self.duplicates.repeated)} repeated rows")
        return "usable, but " + ", ".join(troubles) if troubles else "good"

    def as_dict(self) -> dict:
        """For `--json`: plain values, counts and medians in place of long lists."""
        return dict(
            rows=len(self.examples) + len(self.rejected),
            usable=len(self.examples),
            bad_share=self.bad_share,
            rejected=dict(Counter(rejection.kind for rejection in self.rejected).most_common()),
            rejections=[dict(file=r.file, line=r.line, reason=r.reason) for r in self.rejected],
            notes=dict(self.notes),
            tokens=_summary(self.tokens),
            label_share=self.label_share,
            pictures=len(self.sizes),
            megapixels=_summary([width * height / 1e6 for width, height in self.sizes]),
            picture_groups=len(self.duplicates.groups()) if self.duplicates else None,
            repeated=[self._places(rows) for rows in self.duplicates.repeated] if self.duplicates else None,
            conflicts=[self._places(rows) for rows in self.duplicates.conflicts] if self.duplicates else None,
            attributes={name: dict(values.most_common()) for name, values in self.attributes.items()},
            slowest=[dict(seconds=seconds, place=place) for seconds, place in self.slowest],
            verdict=self.verdict,
        )

    @property
    def label_share(self) -> float:
        """Learnt tokens over all tokens."""
        return sum(self.learnt_tokens) / max(1, sum(self.tokens))

    def _places(self, rows: Sequence[int]) -> list[str]:
        return [f"{self.examples[row].file}:{self.examples[row].line}" for row in rows]

    def __str__(self) -> str:
        rows = len(self.examples) + len(self.rejected)
        lines = [f"{rows:,} rows, {len(self.examples):,} usable, {len(self.sizes):,} pictures"]
        by_kind = defaultdict(list)
        for rejection in self.rejected:
            by_kind[rejection.kind].append(rejection)
        lines += [""] + ["rejected:"] * bool(by_kind)
        for kind, group in sorted(by_kind.items(), key=lambda item: -len(item[1])):
            lines.append(f"  {len(group):6,}  {kind}   e.g. {group[0].file}:{group[0].line}: {group[0].detail}")
        lines += [f"  {count:6,}  note: {note}" for note, count in self.notes.most_common()]
        if self.tokens:
            lines += ["", f"tokens a row ({self.label_share:.1%} of them learnt):", *_histogram(self.tokens)]
        if self.sizes:
            lines += ["", "longer side of the pictures, px:", *_histogram([max(size) for size in self.sizes])]
        for name, values in self.attributes.items():
            share = ", ".join(f"{value} {count / values.total():.0%}" for value, count in values.most_common(FEW_VALUES))
            lines.append(f"\n{name}: {share}")
        if self.duplicates:
            groups = self.duplicates.groups()
            lines += ["", f"copies: {len(groups)} pictures occur more than once"]
            lines += [f"  repeated row: {', '.join(self._places(rows)[:4])}" for rows in self.duplicates.repeated[:5]]
            lines += [f"  label conflict: {', '.join(self._places(rows)[:4])}" for rows in self.duplicates.conflicts[:5]]
        if self.slowest:
            lines += ["", "slowest pictures:", *(f"  {seconds * 1e3:6.0f} ms  {place}" for seconds, place in self.slowest)]
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])


def check_examples(
    data: LoadedExamples | Sequence[Example],
    processor=None,
    max_length: int | None = None,
    duplicates: bool = True,
    processes: int | None = None,
    progress: bool = True,
) -> CheckReport:
    """Decode every picture, count every token, look for copies and contradictions.

    Args:
        data: from `load_examples` (its rejections are taken over), or a list of examples.
        processor: without one no tokens are counted.
        max_length: rows of more tokens are rejected; needs a processor.
        duplicates: look for copies.
        processes: for decoding; by default one for each core.
        progress: show bars.

    Returns:
        The report; its `examples` are fit for training.

    Raises:
        ValueError: `max_length` without a processor.
    """
    if max_length is not None and processor is None:
        raise ValueError("max_length counts tokens: give the processor, too")
    examples = data.examples if isinstance(data, LoadedExamples) else list(data)
    rejected = list(data.rejected) if isinstance(data, LoadedExamples) else []
    notes = Counter(data.notes) if isinstance(data, LoadedExamples) else Counter()
    scans = scan_pictures((image for example in examples for image in example.images), processes, progress)
    encoder = ChatEncoder(processor) if processor is not None else None
    good, tokens, learnt, sizes, times = [], [], [], {}, {}
    for example in tqdm(examples, "counting tokens", disable=not progress):
        try:
            for image in example.images:
                if scans[image].error is not None:
                    raise RowError(*scans[image].error)
            count = labels = 0
            if encoder is not None:
                images = [count_image_tokens(processor, *scans[image].size) for image in example.images]
                ids, targets = encoder.encode(example, images)
                count, labels = len(ids), sum(target >= 0 for target in targets)
                if max_length is not None and count > max_length:
                    raise RowError("too many tokens", f"{count}, limit {max_length}")
            good.append(example)
            tokens.append(count)
            learnt.append(labels)
        except RowError as error:
            rejected.append(Rejection(example.file, example.line, error.kind, error.detail))
        for image in example.images:
            times.setdefault(image, (scans[image].seconds, f"{example.file}:{example.line} {image[:200]}"))
            if scans[image].error is None:
                sizes.setdefault(image, scans[image].size)
    found = find_duplicates(good, scans, progress=progress) if duplicates else None
    rejected.sort(key=lambda rejection: (rejection.file, rejection.line))
    counted = encoder is not None
    return CheckReport(
        examples=good,
        rejected=rejected,
        notes=notes,
        tokens=tokens if counted else [],
        learnt_tokens=learnt if counted else [],
        sizes=list(sizes.values()),
        duplicates=found,
        attributes=count_attributes(good),
        slowest=sorted(times.values(), reverse=True)[:5],
    )


def count_attributes(examples: Sequence[Example]) -> dict[str, Counter]:
    """How often each value of each attribute occurs in the last answers, if most of them are made of attributes."""
    parsed = [pairs for pairs in (parse_answer(example.answer) for example in examples) if pairs is not None]
    values = defaultdict(Counter)
    for pairs in parsed:
        for name, value in pairs.items():
            values[name][value] += 1
    if 2 * len(parsed) <= len(examples):
        return {}
    return {name: found for name, found in values.items() if len(found) <= FEW_VALUES}


def _summary(values: Sequence[float]) -> dict | None:
    if not values:
        return None
    return dict(least=min(values), median=statistics.median(values), most=max(values), mean=statistics.fmean(values))


def _histogram(values: Sequence[int]) -> list[str]:
    low, high = min(values), max(values)
    width = max(1, -(-(high + 1 - low) // BINS))
    counts = Counter((value - low) // width for value in values)
    most = max(counts.values())
    lines = []
    for number in range((high - low) // width + 1):
        begin, end = low + number * width, min(high, low + (number + 1) * width - 1)
        lines.append(f"  {begin:6}-{end:<6} {'#' * -(-BAR * counts[number] // most):{BAR}} {counts[number]:,}")
    return lines
