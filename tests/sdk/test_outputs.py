"""What users see of a request's end."""

from __future__ import annotations

from motet.sdk.outputs import Usage


def test_usage_is_printed_short_and_rounded():
    usage = Usage(37, 32, 48, 1, 0.00012345, 0.0349876, 0.51234, (("waiting", 0.0),))
    assert str(usage) == (
        "37 prompt tokens (32 cached), 48 output tokens, 1 preemptions; "
        "queued 0.000 s, first token after 0.035 s, 0.512 s in all"
    )
    assert usage.ttft == 0.0349876 and "timeline=(('waiting', 0.0),)" in repr(usage)


def test_usage_says_what_never_came():
    usage = Usage(3, 0, 0, 0, None, None, 0.25, ())
    assert str(usage).endswith("0 preemptions; never ran, no token, 0.250 s in all")
