"""One report on a data set before it is trained on: what is used, what isn't and why, how long the rows are, what repeats.

Every picture is decoded once, on all cores, and none is kept.
"""

import heapq
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tqdm.auto import tqdm

from vlftlib.copies import Scan, scan_pictures
from vlftlib.dataset import count_image_tokens
from vlftlib.duplicates import Duplicates, find_duplicates, find_leaks
from vlftlib.encoding import ChatEncoder
from vlftlib.evaluation import parse_answer
from vlftlib.forms import Example, Rejection, RowError
from vlftlib.reading import LoadedExamples

BINS, BAR = 8, 40
FEW_VALUES = 20  # an attribute with more values than this is no class, but a name or a number
BATCH_ROWS, BATCH_CHARACTERS = 256, 2**20  # whose tokens are counted together


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
    leaks: list[dict[str, list[Example]]] = field(default_factory=list)  # pictures in more than one part, their rows by part
    attributes: dict[str, Counter] = field(default_factory=dict)
    slowest: list[tuple[float, str]] = field(default_factory=list)  # seconds to decode a row's pictures, and "file:line picture"

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
        if self.leaks:
            troubles.append(f"{len(self.leaks)} pictures occur in more than one part")
        if self.duplicates and self.duplicates.conflicts:
            troubles.append(f"{len(self.duplicates.conflicts)} label conflicts")
        if self.duplicates and self.duplicates.repeated:
            troubles.append(f"{sum(len(rows) - 1 for rows in self.duplicates.repeated)} repeated rows")
        return "usable, but " + ", ".join(troubles) if troubles else "good"

    @property
    def label_share(self) -> float:
        """Learnt tokens over all tokens."""
        return sum(self.learnt_tokens) / max(1, sum(self.tokens))

    @property
    def longer_sides(self) -> list[int]:
        """In px, a picture."""
        return [max(size) for size in self.sizes]

    def as_dict(self) -> dict:
        """For `--json`: plain values, counts and medians in place of long lists."""
        found = self.duplicates
        return dict(
            rows=len(self.examples) + len(self.rejected),
            usable=len(self.examples),
            bad_share=self.bad_share,
            rejected=dict(Counter(rejection.kind for rejection in self.rejected).most_common()),
            rejections=[dict(file=r.file, line=r.line, reason=r.reason) for r in self.rejected],
            notes=dict(self.notes),
            tokens=_summary(self.tokens),
            token_histogram=_bins(self.tokens),
            label_share=self.label_share,
            pictures=len(self.sizes),
            megapixels=_summary([width * height / 1e6 for width, height in self.sizes]),
            longer_side_histogram=_bins(self.longer_sides),
            picture_groups=len(found.groups()) if found else None,
            pictures_not_compared=found.cut if found else None,
            repeated=[self._places(rows) for rows in found.repeated] if found else None,
            conflicts=[self._places(rows) for rows in found.conflicts] if found else None,
            leaks=[{part: [_place(row) for row in rows] for part, rows in leak.items()} for leak in self.leaks],
            attributes={name: dict(values.most_common()) for name, values in self.attributes.items()},
            slowest=[dict(seconds=seconds, place=place) for seconds, place in self.slowest],
            verdict=self.verdict,
        )

    def _places(self, rows: Sequence[int]) -> list[str]:
        return [_place(self.examples[row]) for row in rows]

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
            lines += ["", "longer side of the pictures, px:", *_histogram(self.longer_sides)]
        for name, values in self.attributes.items():
            share = ", ".join(f"{value} {count / values.total():.0%}" for value, count in values.most_common(FEW_VALUES))
            lines.append(f"\n{name}: {share}")
        if self.duplicates:
            lines += ["", f"copies: {len(self.duplicates.groups())} pictures occur more than once"]
            if self.duplicates.cut:
                lines.append(f"  {self.duplicates.cut:,} pictures look like so many others that only the nearest were compared")
            for leak in self.leaks[:5]:
                lines.append("  in more than one part: " + ", ".join(f"{part} {_place(found[0])}" for part, found in leak.items()))
            lines += [f"  repeated row: {', '.join(self._places(rows)[:4])}" for rows in self.duplicates.repeated[:5]]
            lines += [f"  label conflict: {', '.join(self._places(rows)[:4])}" for rows in self.duplicates.conflicts[:5]]
        if self.slowest:
            lines += ["", "slowest rows:", *(f"  {seconds * 1e3:6.0f} ms  {place}" for seconds, place in self.slowest)]
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])


def check_examples(
    data: LoadedExamples | Sequence[Example] | Mapping[str, LoadedExamples],
    processor=None,
    max_length: int | None = None,
    duplicates: bool = True,
    processes: int | None = None,
    progress: bool = True,
) -> CheckReport:
    """Decode every picture, count every token, look for copies, contradictions and leaks.

    Args:
        data: from `load_examples` (its rejections are taken over), several such by the names of the data set's parts, or a
            list of examples.
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
    if not isinstance(data, Mapping):
        data = {"all": data if isinstance(data, LoadedExamples) else LoadedExamples(list(data), [])}
    examples = [(part, example) for part, loaded in data.items() for example in loaded.examples]
    rejected = [rejection for loaded in data.values() for rejection in loaded.rejected]
    scans = scan_pictures((image for _, example in examples for image in example.images), processes, progress)
    counted = _count_tokens([example for _, example in examples], scans, processor, progress)
    good, parts, tokens, learnt = [], defaultdict(list), [], []
    for count, (part, example) in zip(counted, examples):  # in this order, so that the bar is closed at the end
        if not isinstance(count, RowError) and max_length is not None and count[0] > max_length:
            count = RowError("too many tokens", f"{count[0]}, limit {max_length}")
        if isinstance(count, RowError):
            rejected.append(Rejection(example.file, example.line, count.kind, count.detail))
            continue
        good.append(example)
        parts[part].append(example)
        if processor is not None:
            tokens.append(count[0])
            learnt.append(count[1])
    found = find_duplicates(good, scans, progress=progress) if duplicates else None
    return CheckReport(
        examples=good,
        rejected=sorted(rejected, key=lambda rejection: (rejection.file, rejection.line)),
        notes=sum((loaded.notes for loaded in data.values()), Counter()),
        tokens=tokens,
        learnt_tokens=learnt,
        sizes=[scan.size for scan in scans.values() if scan.error is None],
        duplicates=found,
        leaks=find_leaks(parts, found) if found else [],
        attributes=count_attributes(good),
        slowest=_slowest([example for _, example in examples], scans),
    )


def _count_tokens(
    examples: Sequence[Example], scans: Mapping[str, Scan], processor, progress: bool
) -> Iterator[tuple[int, int] | RowError]:
    """Tokens and learnt tokens of each row (none without a processor), or why it can't be used."""
    encoder = ChatEncoder(processor) if processor is not None else None
    with tqdm(total=len(examples), desc="counting tokens", unit="row", disable=not progress) as bar:
        for batch in _batches(examples):
            errors = [next((scans[image].error for image in example.images if scans[image].error), None) for example in batch]
            readable = [example for example, error in zip(batch, errors) if error is None]
            counts = iter([(0, 0)] * len(readable))
            if encoder is not None:
                pictures = [[count_image_tokens(processor, *scans[image].size) for image in e.images] for e in readable]
                counts = iter(encoder.count(readable, pictures))
            yield from (next(counts) if error is None else RowError(*error) for error in errors)
            bar.update(len(batch))


def _batches(examples: Sequence[Example]) -> Iterator[list[Example]]:
    batch, held = [], 0
    for example in examples:
        batch.append(example)
        held += sum(len(part.get("text", "")) for message in example.messages for part in message["content"])
        if len(batch) == BATCH_ROWS or held > BATCH_CHARACTERS:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _slowest(examples: Sequence[Example], scans: Mapping[str, Scan], count: int = 5) -> list[tuple[float, str]]:
    times = ((sum(scans[image].seconds for image in e.images), index) for index, e in enumerate(examples) if e.images)
    return [
        (seconds, f"{_place(examples[index])} {max(examples[index].images, key=lambda image: scans[image].seconds)[:200]}")
        for seconds, index in heapq.nlargest(count, times)
    ]


def count_attributes(examples: Sequence[Example]) -> dict[str, Counter]:
    """How often each value of each attribute occurs in the last answers, if most of them are made of attributes."""
    values, parsed = defaultdict(Counter), 0
    for example in examples:
        pairs = parse_answer(example.answer)
        parsed += pairs is not None
        for name, value in (pairs or {}).items():
            if len(values[name]) <= FEW_VALUES:
                values[name][value] += 1
    if 2 * parsed <= len(examples):
        return {}
    return {name: found for name, found in values.items() if len(found) <= FEW_VALUES}


def _place(example: Example) -> str:
    return f"{example.file}:{example.line}"


def _summary(values: Sequence[float]) -> dict | None:
    if not values:
        return None
    return dict(least=min(values), median=statistics.median(values), most=max(values), mean=statistics.fmean(values))


def _bins(values: Sequence[int]) -> list[tuple[int, int, int]]:
    """First value, last value and count of up to BINS bins of one width."""
    if not values:
        return []
    low, high = min(values), max(values)
    width = max(1, -(-(high + 1 - low) // BINS))
    counts = Counter((value - low) // width for value in values)
    return [
        (low + number * width, min(high, low + (number + 1) * width - 1), counts[number])
        for number in range((high - low) // width + 1)
    ]


def _histogram(values: Sequence[int]) -> list[str]:
    bins = _bins(values)
    most = max(count for _, _, count in bins)
    return [f"  {begin:6}-{end:<6} {'#' * -(-BAR * count // most):{BAR}} {count:,}" for begin, end, count in bins]
