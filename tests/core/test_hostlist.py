"""Host lists and comma-separated options."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachexfs.core.hostlist import HOSTS_MAX, check_name, expand, split_host_port, split_outside_brackets
from cachexfs.errors import UsageError


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("n[1-2],login,gpu[3]", ["n1", "n2", "login", "gpu3"]),
        ("a;b;c", ["a", "b", "c"]),
        ("n[1-2]:7000", ["n1:7000", "n2:7000"]),
        ("[fe80::1]:7000;[fe80::2]", ["[fe80::1]:7000", "[fe80::2]"]),
        ("", []),
    ],
)
def test_lists_that_launchers_print(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["n[1-", "n]1[", "n[[1]]", "n[4-1]", "n[a-b]", "n[]", "n1;n1", "n[1-3];n2", "n[1-99999999]"]
)
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        expand(text)


def test_a_list_is_bounded_before_it_is_made() -> None:
    with pytest.raises(UsageError, match=str(HOSTS_MAX)):
        expand("a[1-9999]b[1-9999]c[1-9999]")


@given(st.lists(st.integers(min_value=0, max_value=9999), min_size=1, max_size=50, unique=True))
def test_numbers_in_brackets_come_back_in_their_order(numbers: list[int]) -> None:
    assert expand(f"n[{','.join(map(str, numbers))}]") == [f"n{number}" for number in numbers]


@given(st.text(alphabet="n1[]-,;:x0", max_size=30))
def test_any_text_is_a_list_or_a_usage_error(text: str) -> None:
    try:
        names = expand(text)
    except UsageError:
        return
    assert len(set(names)) == len(names)


def test_a_comma_in_brackets_belongs_to_the_value() -> None:
    assert split_outside_brackets("rw,nodes=n[1-4,7],memory=4G", ",") == ["rw", "nodes=n[1-4,7]", "memory=4G"]


def test_host_and_port() -> None:
    assert split_host_port("n1") == ("n1", 0)
    assert split_host_port("n1:80") == ("n1", 80)
    assert split_host_port(":80") == ("", 80)
    assert split_host_port("[::1]:80") == ("::1", 80)
    assert split_host_port("[::1]") == ("::1", 0)
    for text in ("n1:", "n1:x", "n1:70000", "::1", "n1:８０"):
        with pytest.raises(UsageError):
            split_host_port(text)


def test_a_name_fits_into_paths_keys_and_attributes() -> None:
    assert check_name("n1.cluster:7000", "the node") == "n1.cluster:7000"
    for name in ("", "../x", "a b", "a/b", "a\n", "-a", "n" * 201):
        with pytest.raises(UsageError):
            check_name(name, "the node")
