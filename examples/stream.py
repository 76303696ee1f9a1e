"""One stream from the base model: the smallest motet program."""

import asyncio

from motet import AsyncEngine, SamplingParams

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


async def main() -> None:
    async with AsyncEngine("demo") as engine:
        async for token in engine.stream(PROMPT, SamplingParams(max_tokens=40)):
            print(token.text, end="", flush=True)
        print()


asyncio.run(main())
