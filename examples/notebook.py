"""How a notebook uses motet: each cell runs by itself on a loop that is running already; the engine stays.

`# %%` begins a cell, for editors that know them. In a notebook the bodies of the `async def`s below stand in the
cells as they are: `await` works at the top level there.
"""

from __future__ import annotations

import asyncio

from motet import AsyncEngine, Engine, SamplingParams

engine = AsyncEngine("demo")
params = SamplingParams(max_tokens=16)


# %% Start once. No `async with`: it would end with the cell.
async def cell_1() -> None:
    await engine.start()


# %% Stream into the output of the cell.
async def cell_2() -> None:
    async for token in engine.stream("The three primary colours are", params):
        print(token.text, end="", flush=True)
    print()


# %% Blocking code works, too, although a loop runs in this very thread.
def cell_3() -> None:
    with Engine("demo") as blocking:
        print(blocking.generate("Two plus two is", params).text)


# %% Close at the end, or let the notebook's exit do it.
async def cell_4() -> None:
    await engine.aclose()


async def notebook() -> None:
    await cell_1()
    await cell_2()
    cell_3()
    await cell_4()


if __name__ == "__main__":
    asyncio.run(notebook())
