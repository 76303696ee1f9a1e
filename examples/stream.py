"""One answer of the base model, streamed: the smallest motet program."""

import asyncio

from motet import AsyncEngine, SamplingParams

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


async def main() -> None:
    async with AsyncEngine("demo") as engine:
        async for token in engine.chat(MESSAGES, SamplingParams(max_tokens=40)):
            print(token.text, end="", flush=True)
        print()


asyncio.run(main())
