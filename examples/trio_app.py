"""The same engine under trio: two streams in one nursery, one of them with a time limit."""

import trio

from motet import AsyncEngine, SamplingParams

PARAMS = SamplingParams(max_tokens=60)


async def tell(engine: AsyncEngine, name: str, question: str, seconds: float) -> None:
    messages = [{"role": "user", "content": question}]
    with trio.move_on_after(seconds) as limit:  # leaving the stream early ends its request
        async with engine.chat(messages, PARAMS) as stream:
            text = "".join([token.text async for token in stream])
            print(f"{name}: {text}")
    if limit.cancelled_caught:
        print(f"{name}: out of time")


async def main() -> None:
    async with AsyncEngine("demo") as engine, trio.open_nursery() as nursery:
        nursery.start_soon(tell, engine, "patient", "What is the capital of France?", 60)
        nursery.start_soon(tell, engine, "hasty", "Tell me a very long story.", 0.5)


trio.run(main)
