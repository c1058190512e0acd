"""Sizes, rates and durations as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.core.sizes import format_duration, format_rate, format_size, parse_duration, parse_rate, parse_size
from cachexfs.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("64G", 64 << 30),
        ("64g", 64 << 30),
        ("64GiB", 64 << 30),
        ("64GB", 64 * 10**9),
        ("1.5M", 3 << 19),
        ("512k", 512 << 10),
        (" 7 KiB ", 7168),
        ("12B", 12),
    ],
)
def test_sizes_that_people_write(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "64X", "1e9", "64 G G", "0x10", "９G", "inf", "99999999P"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_a_share_is_of_the_whole() -> None:
    assert parse_size("25%", 1000) == 250
    assert parse_size("12.5 %", 1000) == 125
    for text in ("0%", "101%", "-5%"):
        with pytest.raises(UsageError):
            parse_size(text, 1000)
    with pytest.raises(UsageError, match="share of nothing"):
        parse_size("25%")


def test_rates() -> None:
    assert parse_rate("500M") == parse_rate("500M/s") == 500 << 20
    assert parse_rate("none") is None
    with pytest.raises(UsageError):
        parse_rate("0")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45", 45.0),
        ("45s", 45.0),
        ("0.5", 0.5),
        ("500ms", 0.5),
        ("2m", 120.0),
        ("2min", 120.0),
        ("1h30m", 5400.0),
        ("1d", 86400.0),
    ],
)
def test_durations_that_people_write(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1", "5 parsecs", "1h nonsense", "999d", "nan"])
def test_a_duration_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


@given(st.integers(min_value=0, max_value=1 << 59))
def test_a_printed_size_reads_back_within_its_digits(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size * 0.05


def test_printed_forms() -> None:
    assert format_size(0) == "0 B"
    assert format_size(1536) == "1.5 KiB"
    assert format_size(200 << 30) == "200 GiB"
    assert format_rate(1 << 20) == "1.0 MiB/s"
    assert [format_duration(s) for s in (0.25, 12.34, 245, 11520, 183600)] == [
        "250 ms",
        "12.3 s",
        "4 m 05 s",
        "3 h 12 m",
        "2 d 03 h",
    ]
