"""Writes the workloads W1–W5 as JSONL of fixed token ids: the same seed gives the same files everywhere.

    python -m benchmarks.workloads [FOLDER]

    w1     5 requests, one at a time: 128 prompt tokens, 128 output tokens
    w2     64 requests at once, skewed lengths: 13,090 prompt tokens, 7,824 output tokens
    w3     w2 with 8 adapters in turn; w3b64: with 64
    w4     32 requests at once that share their first 512 tokens
    w5     400 requests that arrive over time, lengths as in w2
    warm   8 short requests to warm an engine up

Each line is a `benchmarks.common.Request`. Decoding is greedy and ignores end tokens, so an engine makes exactly
`max_tokens` tokens of each.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common import WORKLOADS_FOLDER, make_parser

Row = Mapping[str, object]


def make_workloads(vocab_size: int = 49152, first_id: int = 17, seed: int = 7) -> dict[str, list[Row]]:
    """Every workload by name. Ids below `first_id` (the special tokens) do not occur.

    The order of the draws is part of the definition: moving one changes all that follow.
    """
    rng = random.Random(seed)

    def token_ids(count: int) -> list[int]:
        return [rng.randrange(first_id, vocab_size) for _ in range(count)]

    def skewed(median: int, sigma: float, low: int, high: int) -> int:
        return max(low, min(high, round(math.exp(rng.gauss(math.log(median), sigma)))))

    def request(number: int, prompt: list[int], max_tokens: int) -> dict[str, object]:
        return {"id": number, "prompt": prompt, "max_tokens": max_tokens, "adapter": None}

    def skewed_request(number: int) -> dict[str, object]:
        prompt = token_ids(skewed(130, 0.8, 32, 512))
        return request(number, prompt, skewed(90, 0.7, 16, 256))

    w1 = [request(i, token_ids(128), 128) for i in range(5)]
    w2 = [skewed_request(i) for i in range(64)]
    prefix = token_ids(512)
    w4 = [request(i, prefix + token_ids(32), 64) for i in range(32)]
    w5 = [{**skewed_request(i), "gap": rng.expovariate(1)} for i in range(400)]
    warm = [request(i, token_ids(64), 8) for i in range(8)]
    return {
        "w1": list(w1),
        "w2": list(w2),
        "w3": [{**row, "adapter": f"a{i % 8}"} for i, row in enumerate(w2)],
        "w3b64": [{**row, "adapter": f"a{i % 64}"} for i, row in enumerate(w2)],
        "w4": list(w4),
        "w5": list(w5),
        "warm": list(warm),
    }


def write_workloads(workloads: Mapping[str, Sequence[Row]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in workloads.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=WORKLOADS_FOLDER)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--first-id", type=int, default=17)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    workloads = make_workloads(arguments.vocab_size, arguments.first_id, arguments.seed)
    write_workloads(workloads, arguments.folder)
    print(f"{', '.join(workloads)} -> {arguments.folder}")


if __name__ == "__main__":
    main()
