"""A list of prompts answered as fast as the machine can, order kept, each error in its place."""

from __future__ import annotations

import asyncio

from motet import AsyncEngine, Completion, SamplingParams

COUNTRIES = ("France", "Italy", "Japan", "Peru", "Kenya", "Norway")


async def main() -> None:
    prompts: list[str | list[int]] = [f"The capital of {country} is" for country in COUNTRIES]
    prompts.append([10**9])  # no token of any model: an error in its place, and no harm to the others
    async with AsyncEngine("demo") as engine:
        results = await engine.generate_batch(prompts, SamplingParams(max_tokens=8, stop=["\n", "."]))
    for prompt, result in zip(prompts, results, strict=True):
        answer = result.text if isinstance(result, Completion) else f"{type(result).__name__}: {result}"
        print(prompt, "->", answer)


if __name__ == "__main__":
    asyncio.run(main())
