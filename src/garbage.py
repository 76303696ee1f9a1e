"""collections_paused: work that makes many objects and no garbage, without Python walking over them again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collections_paused() -> Iterator[None]:
    """No cyclic garbage collection, in the whole process, until the block ends.

    Importing torch leaves half a million objects; to walk over them, each time there are a quarter more, takes a
    sixth of the import. What the block made joins the oldest generation, as if it had been walked. Nested blocks
    pause until the outermost ends; of two threads' blocks that overlap, both end with the first.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else the application has frozen objects, which shall stay so
            gc.freeze()
            gc.unfreeze()
        gc.enable()
