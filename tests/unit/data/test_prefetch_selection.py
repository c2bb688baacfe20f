"""Test the split of files between ranks, ratios and limits."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_client.datasets.prefetch.errors import PrefetchError
from gpu_client.datasets.prefetch.selection import FileLink, ListedFile, ListedSource, select_files, split_ratio
from gpu_client.transport.net.cancellation import CancelEvent


class NumberedSource:
    """Source with numbered files."""

    def __init__(self, name: str, files: int) -> None:
        self.name = self.directory = name
        self.files = [
            ListedFile(path=f"{name}/{'even' if number % 2 == 0 else 'odd'}/{number:04}", size_bytes=1, checksum="x")
            for number in reversed(range(files))
        ]

    def list_files(self, cancel: CancelEvent) -> tuple[str, list[ListedFile]]:
        raise NotImplementedError

    def link(self, file: ListedFile, cancel: CancelEvent) -> FileLink:
        raise NotImplementedError


def select(files: list[int], ratios: list[int] | None = None, **options: object) -> list[list[str]]:
    """Return the selected paths of sources with these numbers of files."""
    weights = [None] * len(files) if ratios is None else [Fraction(ratio) for ratio in ratios]
    sources = [NumberedSource(f"s{number}", count) for number, count in enumerate(files)]
    listed = [ListedSource(one, weight, "r", one.files) for one, weight in zip(sources, weights, strict=True)]
    selected = select_files(listed, **{"rank": 0, "world": 1, **options})
    return [[file.path for file in part.files] for part in selected]


@pytest.mark.parametrize(
    ("text", "name", "ratio"),
    [
        ("digits", "digits", None),
        ("digits:55", "digits", Fraction(55)),
        ("hf:a/b", "hf:a/b", None),
        ("hf:a/b:0.5", "hf:a/b", Fraction(1, 2)),
        ("hf:a/b@refs%2Fconvert%2Fparquet/c:10", "hf:a/b@refs%2Fconvert%2Fparquet/c", Fraction(10)),
    ],
)
def test_the_last_number_is_the_ratio(text: str, name: str, ratio: Fraction | None) -> None:
    assert split_ratio(text) == (name, ratio)


@pytest.mark.parametrize(
    ("files", "ratios", "max_files", "counts"),
    [
        ([3, 5], None, None, [3, 5]),
        ([30, 50], None, 16, [6, 10]),
        ([300, 300, 300, 300, 300], [55, 10, 20, 10, 5], 100, [55, 10, 20, 10, 5]),
        ([166, 100, 100, 100, 8], [55, 10, 20, 10, 5], None, [88, 16, 32, 16, 8]),
        ([166, 100, 100, 100, 8], [55, 10, 20, 10, 5], 50, [27, 5, 10, 5, 2]),
        ([10, 10], [1, 1], None, [10, 10]),
        ([10, 10, 10], [1000, 1, 1], 3, [1, 1, 1]),
    ],
)
def test_counts(files: list[int], ratios: list[int] | None, max_files: int | None, counts: list[int]) -> None:
    assert [len(part) for part in select(files, ratios, max_files=max_files)] == counts


@given(st.integers(1, 12), st.lists(st.integers(12, 40), min_size=1, max_size=3))
def test_the_ranks_share_all_files(world: int, files: list[int]) -> None:
    shares = [select(files, rank=rank, world=world) for rank in range(world)]
    for number, count in enumerate(files):
        paths = sorted(path for share in shares for path in share[number])
        assert paths == sorted(file.path for file in NumberedSource(f"s{number}", count).files)


def test_a_filter_reads_the_path_below_the_source() -> None:
    assert select([6], filters=["odd", "0004"]) == [["s0/even/0004", "s0/odd/0001", "s0/odd/0003", "s0/odd/0005"]]
    assert select([6], filters=["odd"], rank=1, world=2) == [["s0/odd/0003"]]


@pytest.mark.parametrize(
    ("files", "ratios", "options", "message"),
    [
        ([3], None, {"rank": 3, "world": 4}, "no_files: s0 has 3 files, and none for rank 3 of 4"),
        (
            [3],
            None,
            {"filters": ["s0"]},
            "no_files: s0 has 3 files of which 0 match --filter, and none for rank 0 of 1",
        ),
        ([3, 3], [1, 2], {"max_files": 1}, "invalid_source: --max-files is 1, with 2 sources"),
    ],
)
def test_refusals(files: list[int], ratios: list[int] | None, options: dict[str, object], message: str) -> None:
    with pytest.raises(PrefetchError) as caught:
        select(files, ratios, **options)
    assert str(caught.value) == message


def test_sources_with_ratio_and_without_do_not_mix() -> None:
    mixed = [("a", Fraction(1)), ("b", None)]
    listed = [ListedSource(one := NumberedSource(name, 2), ratio, "r", one.files) for name, ratio in mixed]
    with pytest.raises(PrefetchError, match="invalid_source: b has no ratio"):
        select_files(listed, rank=0, world=1)
    with pytest.raises(PrefetchError, match="the ratio of a is 0"):
        split_ratio("a:0")


def test_sources_with_a_common_file_are_refused() -> None:
    """The training would otherwise read the file twice."""
    one = NumberedSource("a", 2)
    with pytest.raises(PrefetchError, match="invalid_source: a/odd/0001 belongs to a and to a"):
        select_files([ListedSource(one, None, "r", one.files)] * 2, rank=0, world=1)
