from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motet.runtime.block_hash import block_hash, root_hash
from strategies import FEW

# Few letters and NULs: different fields that look alike once they stand side by side are likely.
SHORT_BYTES = st.text(alphabet="ab\0", max_size=3).map(str.encode)
SHORT_TEXT = st.text(alphabet="ab\0", max_size=3)
ROOT_FIELDS = st.tuples(SHORT_BYTES, SHORT_TEXT, SHORT_TEXT, st.none() | SHORT_BYTES, SHORT_TEXT)
BLOCK_FIELDS = st.tuples(SHORT_BYTES, st.lists(st.sampled_from([0, 1, 255, 256, 2**32]), max_size=3))


@given(ROOT_FIELDS, ROOT_FIELDS)
@FEW
def test_two_roots_are_equal_exactly_if_all_their_fields_are(
    a: tuple[bytes, str, str, bytes | None, str], b: tuple[bytes, str, str, bytes | None, str]
) -> None:
    assert (root_hash(*a) == root_hash(*b)) == (a == b)


def test_no_two_ways_to_split_the_same_bytes_into_fields_meet() -> None:
    fields = ["", "a", "b", "ab", "ba", "a\0", "\0a"]
    roots = [
        root_hash(model.encode(), dtype, layout, adapter, scope)
        for model in fields
        for dtype in fields
        for layout in fields
        for adapter in (None, b"", b"a", b"ab")
        for scope in fields
    ]
    assert len(set(roots)) == len(roots) == 7**4 * 4


def test_no_adapter_is_not_an_adapter_with_an_empty_digest() -> None:
    assert root_hash(b"m", "float32", "l", None, "s") != root_hash(b"m", "float32", "l", b"", "s")


@given(BLOCK_FIELDS, BLOCK_FIELDS)
@FEW
def test_two_blocks_are_equal_exactly_if_parent_and_tokens_are(
    a: tuple[bytes, list[int]], b: tuple[bytes, list[int]]
) -> None:
    assert (block_hash(*a) == block_hash(*b)) == (a == b)


@given(ROOT_FIELDS, BLOCK_FIELDS)
@FEW
def test_a_root_is_never_a_block(
    root: tuple[bytes, str, str, bytes | None, str], block: tuple[bytes, list[int]]
) -> None:
    assert root_hash(*root) != block_hash(*block)


def test_a_block_covers_everything_before_it() -> None:
    first, other = block_hash(b"root", [1, 2]), block_hash(b"root", [1, 3])
    assert block_hash(first, [4, 5]) != block_hash(other, [4, 5])


def test_hashes_are_the_same_in_every_process_and_on_every_machine() -> None:
    root = root_hash(b"model", "float32", "reference:16", b"adapter", "tenant:acme")
    assert root.hex() == "af5493644c109750ea1552e84df5b66c"
    assert block_hash(root, [1, 2, 3, 70000]).hex() == "262aa34f3869a8040e20689c7a035ac7"
