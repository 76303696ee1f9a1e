"""A chat service for many tenants: server-sent events with Starlette.

    python examples/web_app.py --port 8000
    curl -N localhost:8000/chat -H 'x-tenant: acme' \
        -d '{"messages": [{"role": "user", "content": "Where is my order?"}], "adapter": "pirate"}'

A client that leaves early frees its request: Starlette then cancels the response, and the stream with it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from motet import (
    AdapterNotFound,
    AsyncEngine,
    EngineConfig,
    MotetError,
    QueueFull,
    QuotaExceeded,
    SamplingParams,
    TokenStream,
)

ADAPTERS = Path(__file__).parent / "adapters"

engine = AsyncEngine("demo", EngineConfig(max_waiting=100))


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with engine:
        for folder in sorted(ADAPTERS.iterdir()):
            await engine.load_adapter(folder.name, folder)
        yield


async def chat(request: Request) -> Response:
    try:
        asked = await request.json()
        params = SamplingParams(max_tokens=asked.get("max_tokens", 256))
        stream = engine.chat(
            asked.get("messages"),
            params,
            adapter=asked.get("adapter"),
            tenant=request.headers.get("x-tenant", "default"),
            deadline=60,
        )
    except (AttributeError, ValueError, RecursionError) as error:  # no JSON object, or InvalidRequest
        return refusal(400, error)
    except ClientDisconnect:  # in the middle of its question
        return Response(status_code=400)
    except AdapterNotFound as error:
        return refusal(404, error)
    except (QueueFull, QuotaExceeded) as error:
        return refusal(
            503 if isinstance(error, QueueFull) else 429,
            error,
            {"retry-after": str(round(error.retry_after) + 1)},
        )
    return StreamingResponse(events(stream), media_type="text/event-stream")


async def events(stream: TokenStream) -> AsyncIterator[str]:
    """One event for each piece of text, then `done` with the usage, or `error`."""
    async with stream:
        try:
            async for token in stream:
                if token.text:
                    yield event("token", {"text": token.text})
        except MotetError as error:
            yield event("error", {"message": str(error)})
        else:
            assert stream.usage is not None
            yield event("done", {"output_tokens": stream.usage.output_tokens, "ttft": stream.usage.ttft})


def event(name: str, data: dict[str, object]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def refusal(status: int, error: Exception, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": str(error)}, status, headers)


async def health(request: Request) -> Response:
    stats = engine.stats()
    return JSONResponse({"running": stats.running, "waiting": stats.waiting, "blocked": stats.blocked})


app = Starlette(
    routes=[
        Route("/chat", chat, methods=["POST"]),
        Route("/health", health),
        Mount("/metrics", engine.metrics_app()),
    ],
    lifespan=lifespan,
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(app, port=parser.parse_args().port, log_level="warning")
