"""The identity of a KV block: what was computed, from which tokens, under which weights, for whom.

Two blocks may share their memory exactly if their hashes are equal. Hashes are chained (a block's hash
covers everything before it) and typed (each part carries its kind and length, so no two different
combinations spell the same bytes). They hold no addresses or names of this process: equal content has
equal hashes after a restart and on another machine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes


def _digest(*parts: tuple[bytes, bytes]) -> BlockHash:
    h = blake2b(digest_size=16)
    for kind, value in parts:
        h.update(struct.pack("<4sQ", kind, len(value)))
        h.update(value)
    return h.digest()


def root_hash(
    model_digest: bytes, dtype: str, layout: str, adapter_digest: bytes | None, scope: str
) -> BlockHash:
    """The parent of a first block.

    `dtype` and `layout` say how KV is stored; `adapter_digest` is the content of the adapter that computed
    it (None: the base model alone); `scope` names those who may share it.
    """
    return _digest(
        (b"modl", model_digest),
        (b"dtyp", dtype.encode()),
        (b"layt", layout.encode()),
        (b"base", b"") if adapter_digest is None else (b"adpt", adapter_digest),
        (b"scop", scope.encode()),
    )


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of one full block behind `parent` (the previous block's, or the root)."""
    return _digest((b"prnt", parent), (b"toks", struct.pack(f"<{len(token_ids)}Q", *token_ids)))
