"""examples/web_app.py as its clients see it, over a real socket."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

APP = Path(__file__).parents[1] / "examples" / "web_app.py"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (
        subprocess.Popen([sys.executable, str(APP), "--port", str(port)]) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
    ):
        try:
            wait_until(lambda: server.poll() is not None or is_up(client), seconds=60)
            yield client
        finally:
            server.terminate()


def is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def wait_until(condition, seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.05)


def events(response: httpx.Response) -> Iterator[tuple[str, dict]]:
    name = ""
    for line in response.iter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)


def ask(client: httpx.Client, **body: object):
    return client.stream("POST", "/chat", json={"messages": QUESTION} | body)


def test_an_answer_arrives_as_server_sent_events(client):
    with ask(client, max_tokens=8) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        received = list(events(response))
    assert [name for name, _ in received] == ["token"] * (len(received) - 1) + ["done"]
    assert "Paris" in "".join(data["text"] for _, data in received[:-1])
    assert received[-1][1]["output_tokens"] == 8


def test_a_client_that_leaves_frees_its_request(client):
    story = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]
    with ask(client, messages=story, max_tokens=2000) as response:
        received = events(response)  # held: httpx hangs up when its iterator goes
        assert next(received)[0] == "token"
        assert client.get("/health").json()["running"] == 1
    wait_until(lambda: set(client.get("/health").json().values()) == {0}, seconds=5)


@pytest.mark.parametrize(
    ("status", "body"), [(400, {"messages": "Hi"}), (400, {"max_tokens": -1}), (404, {"adapter": "nobody"})]
)
def test_a_bad_request_gets_a_status_and_a_reason(client, status, body):
    with ask(client, **body) as response:
        response.read()
        assert response.status_code == status
        assert response.json()["error"]


@pytest.mark.parametrize("body", [b"{", b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"messages": null}'])
def test_a_body_that_is_no_question_is_a_bad_request(client, body):
    response = client.post("/chat", content=body)
    assert response.status_code == 400
    assert response.json()["error"]


def test_the_metrics_are_served(client):
    assert "motet_output_tokens_total" in client.get("/metrics/").text
