"""What fewer bits cost in quality: perplexity of a text, and how often the likeliest token stays the same.

    python -m benchmarks.quality [--model demo] [--formats bfloat16 int8 ...]

The text, 20,601 tokens of the demo model, is the first chapters of "Persuasion" by Jane Austen (1818; in the public
domain), read in windows that begin anew. Agreement is with the first format's choice, at every token of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import make_parser

from motet import Engine, EngineConfig, SamplingParams

TEXT = Path(__file__).with_name("texts") / "persuasion.txt"

FORMATS = {
    "float32": EngineConfig(dtype="float32"),
    "bfloat16": EngineConfig(dtype="bfloat16"),
    "int8": EngineConfig(dtype="bfloat16", quantization="int8"),
    "int4": EngineConfig(dtype="bfloat16", quantization="int4"),
    "gguf": EngineConfig(dtype="bfloat16", quantization="gguf"),
}


class Reading(NamedTuple):
    """Of each token of the text but each window's first."""

    logprobs: list[float]
    choices: list[int]
    """The likeliest token in its place."""

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Reading) -> float:
        return sum(map(int.__eq__, self.choices, other.choices)) / len(self.choices)


def windows(text: str, size: int) -> Iterator[str]:
    """The text in pieces of whole paragraphs, each of `size` characters or a paragraph's rest more."""
    window = ""
    for paragraph in text.split("\n\n"):
        window += paragraph + "\n\n"
        if len(window) >= size:
            yield window
            window = ""
    if window:
        yield window


def read(model: str, config: EngineConfig, pieces: Sequence[str]) -> Reading:
    asking = SamplingParams(max_tokens=1, prompt_logprobs=1)
    reading = Reading([], [])
    with Engine(model, config) as engine:
        for piece in pieces:
            completion = engine.generate(piece, asking)
            assert completion.prompt_logprobs is not None
            pairs = zip(completion.prompt_token_ids, completion.prompt_logprobs, strict=True)
            for token, logprobs in pairs:
                if logprobs is not None:  # the first has none
                    reading.logprobs.append(logprobs[token])
                    reading.choices.append(max(logprobs, key=logprobs.__getitem__))
    return reading


def report(readings: Sequence[tuple[str, Reading]]) -> None:
    _, first = readings[0]
    for name, reading in readings:
        share = reading.perplexity / first.perplexity - 1
        print(f"{name:10} perplexity {reading.perplexity:.3f} ({share:+.2%})", end="  ")
        print(f"agreement {reading.agreement(first):.2%}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--window", type=int, default=5000, help="characters that are read together")
    arguments = parser.parse_args()
    pieces = list(windows(TEXT.read_text(encoding="utf-8"), arguments.window))
    report([(f, read(arguments.model, FORMATS[f], pieces)) for f in arguments.formats])


if __name__ == "__main__":
    main()
