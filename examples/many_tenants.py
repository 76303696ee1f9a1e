"""Several tenants at once, each through its own LoRA adapter, mixed with the base model in one batch."""

import asyncio
from pathlib import Path

from motet import AsyncEngine, SamplingParams

ADAPTERS = Path(__file__).parent / "adapters"
MESSAGES = [{"role": "user", "content": "Why do cats purr?"}]
PARAMS = SamplingParams(max_tokens=60)


async def main() -> None:
    async with AsyncEngine("demo") as engine:
        names = [folder.name for folder in sorted(ADAPTERS.iterdir())]
        for name in names:
            await engine.load_adapter(name, ADAPTERS / name)
        answers = await asyncio.gather(
            *(
                engine.chat(MESSAGES, PARAMS, adapter=name, tenant=name or "base").result()
                for name in [None, *names]
            )
        )
        for name, answer in zip([None, *names], answers, strict=True):
            print(f"--- {name or 'base'} ({answer.usage.output_tokens} tokens)\n{answer.text}\n")


asyncio.run(main())
