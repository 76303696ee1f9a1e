"""llama.cpp's server over HTTP on the loopback interface: W1–W5. It batches only requests with the same adapter.

build/peers/llama_cpp/bin/python -m benchmarks.peers.llama_server [--loads w2 w4] [--model FILE.gguf] [--slots 32]
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import aiohttp
from benchmarks.common import (
    BF16_GGUF,
    GGUF_ADAPTERS_FOLDER,
    PEERS_FOLDER,
    PeakMemory,
    Request,
    Timing,
    read_workload,
    report,
    runner_arguments,
)
from benchmarks.drive import drive

SERVER = PEERS_FOLDER / "llama_cpp/cmake/bin/llama-server"
CONTEXT = 1024
"""Tokens a slot has room for: no request of W1–W5 has more than 768."""

LONGEST_REQUEST = aiohttp.ClientTimeout(total=1800)


def adapters_of(arguments: Namespace) -> list[str]:
    """All that the loads name: the server wants them when it starts, and numbers them in this order."""
    requests = [request for load in arguments.loads for request in read_workload(arguments.workloads, load)]
    return sorted({request.adapter for request in requests if request.adapter})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def server(arguments: Namespace, adapters: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    threads = str(arguments.threads)
    command = [str(SERVER), "--model", arguments.model, "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--threads",
        threads,
        "--threads-batch",
        threads,
        "--log-verbosity",
        "1",
        "--flash-attn",
        "on",
    ]
    command += ["--parallel", str(arguments.slots), "--ctx-size", str(CONTEXT * arguments.slots)]
    if adapters:
        files = [str(GGUF_ADAPTERS_FOLDER / f"{name}.gguf") for name in adapters]
        command += ["--lora", ",".join(files)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


async def ready(session: aiohttp.ClientSession, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with exit code {process.returncode}; see above")
        try:
            async with session.get("/health") as answer:
                if answer.status == 200:
                    return
        except aiohttp.ClientConnectionError:
            pass  # it does not listen yet
        await asyncio.sleep(0.05)


async def timed(session: aiohttp.ClientSession, request: Request, adapters: Sequence[str]) -> Timing:
    body = {
        "prompt": request.prompt,
        "n_predict": request.max_tokens,
        "temperature": 0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "stream": True,
    }
    if request.adapter:
        body["lora"] = [{"id": adapters.index(request.adapter), "scale": 1.0}]
    elif adapters:
        body["lora"] = [{"id": 0, "scale": 0.0}]  # or it applies all
    tokens: list[float] = []
    sent = time.perf_counter()
    async with session.post("/completion", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                # It sends several at once when a character's bytes are complete, so its own count tells.
                tokens += [time.perf_counter()] * (event["tokens_predicted"] - len(tokens))
    assert len(tokens) == request.max_tokens
    return Timing(sent, tokens)


async def run(arguments: Namespace) -> None:
    adapters, port = adapters_of(arguments), free_port()
    with PeakMemory() as memory, server(arguments, adapters, port) as process:
        connections = aiohttp.TCPConnector(limit=0, force_close=True)  # the server closes its own after each
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{port}", connector=connections, timeout=LONGEST_REQUEST
        ) as session:
            await ready(session, process)
            await drive(arguments, lambda request: timed(session, request, adapters))
    report(arguments.name, "memory", peak_mib=memory.peak_mib)


def main() -> None:
    parser = runner_arguments(
        __doc__,
        "llama-server",
        ["w1", "w2", "w3", "w3b64", "w4", "w5"],
        default=["w1", "w2"],
        model=BF16_GGUF,
    )
    parser.add_argument("--slots", type=int, default=32, help="requests at a time")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
