"""Rows that repeat or contradict each other, and splits that keep copies of a picture together.

Pictures that count as copies can still differ in what is asked about them: hence rows are dropped only where their answers
agree, too.
"""

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from vlftlib.copies import Scan, group_copies, same_picture, scan_pictures
from vlftlib.forms import Example, Rejection
from vlftlib.images import load_image


@dataclass(frozen=True)
class Duplicates:
    """Pictures in groups of copies; indices of rows with the same pictures and question: of one answer, or of several."""

    pictures: dict[str, int]  # source -> number of its group; a picture without copies has its own
    repeated: list[tuple[int, ...]]
    conflicts: list[tuple[int, ...]]
    cut: int = 0  # pictures that look like so many others that not all were compared

    def groups(self) -> list[list[str]]:
        """The groups of two and more pictures."""
        members = defaultdict(list)
        for source, group in self.pictures.items():
            members[group].append(source)
        return [group for group in members.values() if len(group) > 1]


def find_duplicates(
    examples: Sequence[Example], scans: Mapping[str, Scan] | None = None, processes: int | None = None, progress: bool = True
) -> Duplicates:
    """Find copies among the examples' pictures, and rows that repeat or contradict each other.

    Args:
        examples: all rows, of all splits.
        scans: from `scan_pictures`, where it has run already; pictures that can't be used stand alone.
    """
    sources = [image for example in examples for image in example.images]
    scans = scan_pictures(sources, processes, progress) if scans is None else scans
    first = {}  # digest -> source: files of the same bytes need no comparison
    sources = list(dict.fromkeys(sources))
    for source in sources:
        if scans[source].error is None:
            first.setdefault(scans[source].digest, source)
    distinct = list(first.values())
    open_picture = functools.lru_cache(maxsize=2)(load_image)  # one against many; a large one takes 400 MB

    def same(i: int, j: int) -> bool:
        return same_picture(open_picture(distinct[i]), open_picture(distinct[j]))

    groups, cut = group_copies([scans[source] for source in distinct], same, progress=progress)
    of = dict(zip(distinct, groups.tolist()))
    numbers = {}  # in the order of their first pictures; one that can't be read is alone
    pictures = {}
    for source in sources:
        key = source if scans[source].error is not None else of[first[scans[source].digest]]
        pictures[source] = numbers.setdefault(key, len(numbers))
    rows = defaultdict(lambda: defaultdict(list))
    for index, example in enumerate(examples):
        question, answer = _question_and_answer(example)
        rows[tuple(pictures[image] for image in example.images), question][answer].append(index)
    repeated = [tuple(same) for answers in rows.values() for same in answers.values() if len(same) > 1]
    conflicts = [tuple(sorted(sum(answers.values(), []))) for answers in rows.values() if len(answers) > 1]
    return Duplicates(pictures, repeated, conflicts, cut)


def drop_repeated(examples: Sequence[Example], duplicates: Duplicates) -> tuple[list[Example], list[Rejection]]:
    """The examples without rows that repeat an earlier one (same picture, question and answer), and those as rejections."""
    later = {index: same[0] for same in duplicates.repeated for index in same[1:]}
    kept = [example for index, example in enumerate(examples) if index not in later]
    dropped = [
        Rejection(examples[i].file, examples[i].line, "repeats a row", f"{examples[first].file}:{examples[first].line}")
        for i, first in later.items()
    ]
    return kept, dropped


def find_leaks(parts: Mapping[str, Sequence[Example]], duplicates: Duplicates) -> list[dict[str, list[Example]]]:
    """Pictures that occur in more than one part, copies included: for each, its rows by part."""
    places = defaultdict(lambda: defaultdict(list))
    for name, examples in parts.items():
        for example in examples:
            for group in {duplicates.pictures[image] for image in example.images}:
                places[group][name].append(example)
    return [{name: list(rows) for name, rows in found.items()} for found in places.values() if len(found) > 1]


def split_examples(
    examples: Sequence[Example],
    share: float = 0.75,
    stratify: Callable[[Example], Hashable] | None = None,
    seed: int = 0,
    duplicates: Duplicates | None = None,
) -> tuple[list[Example], list[Example]]:
    """Split examples in two, reproducibly; rows that share a picture stay together.

    Without `stratify` a row's side hangs on its own pictures' names and text alone (for rows that share a picture, on the
    first one's), so rows added at the end move none, and the first part has about `share` of them. With it, each stratum
    is cut at `share` exactly, and added rows can move those at the cut.

    Args:
        examples: what to split; the order is kept.
        share: of the first part, between 0 and 1.
        stratify: gives each example's stratum, for instance its answer.
        seed: another seed, another split.
        duplicates: from `find_duplicates` of these examples: copies of a picture stay together, too.

    Returns:
        The first and the second part.

    Raises:
        ValueError: `share` is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share {share}: give a number between 0 and 1")
    clusters = _cluster(examples, duplicates)
    draws = {cluster: _draw(examples[cluster[0]], seed) for cluster in clusters}
    if stratify is None:
        first = {index for cluster in clusters if draws[cluster] < share for index in cluster}
    else:
        strata, first = defaultdict(list), set()
        for cluster in clusters:
            strata[stratify(examples[cluster[0]])].append(cluster)
        for members in strata.values():
            target = round(share * sum(map(len, members)))
            for cluster in sorted(members, key=draws.get):
                if target <= 0:
                    break
                first.update(cluster)
                target -= len(cluster)
    return [e for i, e in enumerate(examples) if i in first], [e for i, e in enumerate(examples) if i not in first]


def _cluster(examples: Sequence[Example], duplicates: Duplicates | None) -> list[tuple[int, ...]]:
    """Indices of rows that must stay together, in order."""
    leader, owner = {index: index for index in range(len(examples))}, {}
    for index, example in enumerate(examples):
        for image in example.images:
            one = _find(leader, owner.setdefault(image if duplicates is None else duplicates.pictures[image], index))
            other = _find(leader, index)
            leader[max(one, other)] = min(one, other)
    clusters = defaultdict(list)
    for index in leader:
        clusters[_find(leader, index)].append(index)
    return [tuple(cluster) for cluster in clusters.values()]


def _find(leader: dict, member: Hashable) -> Hashable:
    while leader[member] != member:
        leader[member] = member = leader[leader[member]]
    return member


def _question_and_answer(example: Example) -> tuple[bytes, bytes]:
    """Digests of what is asked and of what is answered."""
    asked = [(message["role"], message["content"]) for message in example.messages if message["role"] != "assistant"]
    answers = [message["content"] for message in example.messages if message["role"] == "assistant"]
    return tuple(hashlib.blake2b(repr(part).encode("utf-8", "surrogatepass"), digest_size=16).digest() for part in (asked, answers))


def _draw(example: Example, seed: int) -> float:
    """A number in [0, 1) from what the example is."""
    digest = hashlib.sha256(repr((seed, example.picture_names, example.messages)).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
