"""The contract: names, signatures, defaults, and what an import costs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import motet
from motet import AsyncEngine, EngineConfig, LogitsProcessor, SamplingParams, TenantPolicy, Token, TokenStream

NAMES = [
    "AdapterError",
    "AdapterExists",
    "AdapterInfo",
    "AdapterLoadError",
    "AdapterNotAllowed",
    "AdapterNotFound",
    "AdmittedRequest",
    "AsyncEngine",
    "BackendUnavailable",
    "Completion",
    "CompletionOutput",
    "CorruptCheckpoint",
    "DeadlineExceeded",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDead",
    "EngineStats",
    "FinishedRequest",
    "InvalidRequest",
    "LogitsProcessor",
    "ModelError",
    "ModelInfo",
    "ModelNotFound",
    "MotetError",
    "PromptTooLong",
    "QueueFull",
    "QuotaExceeded",
    "RequestAborted",
    "RequestFailed",
    "SamplingParams",
    "TenantPolicy",
    "Token",
    "TokenStream",
    "UnsupportedAdapter",
    "UnsupportedModel",
    "Usage",
    "cpu_backend",
    "register_model",
]

SIGNATURES = {
    AsyncEngine: "(model, config=None, *, registry=None, on_admit=None, on_finish=None, tracing=False)",
    AsyncEngine.start: "(self)",
    AsyncEngine.aclose: "(self, *, drain=0.0)",
    AsyncEngine.stream: "(self, prompt, params=None, *, adapter=None, tenant='default', priority=0, deadline=None, "
    "request_id=None)",
    AsyncEngine.chat: "(self, messages, params=None, *, tools=None, adapter=None, tenant='default', priority=0, "
    "deadline=None, request_id=None)",
    AsyncEngine.generate: "(self, prompt, params=None, *, adapter=None, tenant='default', priority=0, deadline=None, "
    "request_id=None)",
    AsyncEngine.generate_batch: "(self, prompts, params=None, *, progress=False, adapter=None, tenant='default', "
    "priority=0, deadline=None, request_id=None)",
    AsyncEngine.load_adapter: "(self, name, source, *, pin=False, replace=False)",
    AsyncEngine.unload_adapter: "(self, name, *, in_flight='finish')",
    AsyncEngine.adapters: "(self)",
    AsyncEngine.set_tenant: "(self, name, policy)",
    AsyncEngine.abort: "(self, request_id)",
    AsyncEngine.stats: "(self)",
    AsyncEngine.metrics_app: "(self)",
    AsyncEngine.model_info: "(self)",
    motet.cpu_backend: "()",
    motet.register_model: "(architecture, cls)",
    TokenStream.result: "(self)",
    TokenStream.cancel: "(self)",
    TokenStream.aclose: "(self)",
}

DEFAULTS = {
    SamplingParams: {
        "max_tokens": 256,
        "min_tokens": 0,
        "temperature": None,
        "top_p": None,
        "top_k": None,
        "min_p": None,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "include_stop": False,
        "skip_special_tokens": True,
        "ignore_eos": False,
        "logprobs": None,
        "repetition_penalty": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "logit_bias": None,
        "bad_words": (),
        "allowed_token_ids": None,
        "logits_processors": (),
        "n": 1,
        "prompt_logprobs": None,
    },
    TenantPolicy: {
        "weight": 1.0,
        "max_running": None,
        "max_waiting": None,
        "max_waiting_tokens": None,
        "tokens_per_second": None,
        "burst": None,
        "max_priority": None,
        "adapters": None,
        "prefix_group": None,
    },
    EngineConfig: {
        "name": None,
        "device": "auto",
        "dtype": "auto",
        "quantization": None,
        "packed_weights": None,
        "threads": None,
        "max_model_len": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": None,
        "itl_target": None,
        "block_size": 16,
        "kv_cache_bytes": None,
        "enable_prefix_caching": True,
        "policy": "priority",
        "max_waiting": None,
        "max_waiting_tokens": None,
        "adapter_bytes": 512 << 20,
        "adapter_host_bytes": 2 << 30,
        "adapter_root": None,
        "adapter_resolver": None,
        "max_metric_adapters": 100,
        "seed": 0,
    },
}


def run(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | environment
    ).stdout


def test_the_exported_names_are_these():
    assert motet.__all__ == sorted(NAMES) == dir(motet)
    for name in NAMES:
        assert inspect.getdoc(getattr(motet, name)), f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'Engines'"):
        motet.Engines  # noqa: B018


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_public_signatures_are_the_contract(function):
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert (
        str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
        == SIGNATURES[function]
    )


@pytest.mark.parametrize("model", DEFAULTS, ids=lambda m: m.__name__)
def test_settings_and_their_defaults_are_the_contract(model):
    assert model().model_dump() == DEFAULTS[model]
    assert all(model.__doc__ and field for field in model.model_fields)


@pytest.mark.parametrize("model", DEFAULTS, ids=lambda m: m.__name__)
def test_settings_are_frozen_and_unknown_ones_are_errors(model):
    with pytest.raises(ValueError, match="temprature"):
        model(temprature=1.0)
    with pytest.raises(ValueError, match="frozen"):
        setattr(model(), next(iter(DEFAULTS[model])), 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": "5"},
        {"min_tokens": 5, "max_tokens": 4},
        {"seed": -1},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": 5},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": "a"},
        {"logprobs": -1},
        {"logprobs": 1001},
        {"n": 0},
        {"n": 1025},
        {"prompt_logprobs": -1},
        {"stop": ["a" * 6000, "b" * 6000]},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"logit_bias": {5: 101.0}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": [5]},
        {"bad_words": ["a", ""]},
        {"bad_words": [5]},
        {"bad_words": ["\ud800"]},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": [1.5]},
        {"logits_processors": [None]},
        {"logits_processors": "x"},
    ],
    ids=str,
)
def test_values_that_no_engine_could_accept_are_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 0.0},
        {"weight": float("inf")},
        {"max_running": 0},
        {"max_waiting": -1},
        {"max_waiting_tokens": 0},
        {"tokens_per_second": 0.0},
        {"burst": 5},
        {"burst": 0, "tokens_per_second": 1.0},
        {"max_priority": 0.5},
        {"adapters": 5.0},
        {"adapters": [""]},
        {"prefix_group": ""},
        {"prefix_group": "\ud800"},
    ],
    ids=ascii,
)
def test_policies_that_no_tenant_could_have_are_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TenantPolicy(**wrong)


def test_one_adapter_may_stand_alone():
    assert TenantPolicy(adapters="acme-*") == TenantPolicy(adapters=["acme-*"])


def test_one_stop_may_stand_alone():
    assert SamplingParams(stop="a", stop_token_ids=5) == SamplingParams(stop=["a"], stop_token_ids=(5,))


def test_one_word_one_token_and_one_processor_may_stand_alone():
    def same(token_ids, logits):
        return logits

    alone = SamplingParams(bad_words="a", allowed_token_ids=5, logits_processors=same)
    assert alone == SamplingParams(bad_words=["a"], allowed_token_ids=[5], logits_processors=[same])
    assert isinstance(same, LogitsProcessor)


def test_a_bias_may_come_from_json_whose_keys_are_strings():
    assert SamplingParams(logit_bias={"5": 1, 6: -2.5}).logit_bias == {5: 1.0, 6: -2.5}
    assert SamplingParams.model_validate_json('{"logit_bias": {"5": 1}}').logit_bias == {5: 1.0}


def test_a_token_is_frozen_and_prints_as_its_text():
    token = Token("hi", 5)
    assert f"{token}" == "hi"
    with pytest.raises(AttributeError):
        token.text = "no"


def test_users_type_checkers_see_the_public_names(tmp_path: Path):
    consumer = tmp_path / "consumer.py"
    consumer.write_text(
        f"from motet import {', '.join(NAMES)}\nreveal_type(AsyncEngine('demo').adapters())\n"
    )
    view = tmp_path / "view"
    view.mkdir()
    (view / "motet").symlink_to(Path(motet.__file__).parent)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports=silent",
            "--no-incremental",
            str(consumer),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"MYPYPATH": str(view)},
        check=False,
    )
    assert "list[motet.lora.generation.AdapterInfo]" in done.stdout
    assert "error" not in done.stdout


def test_importing_motet_loads_nothing_but_the_standard_library():
    loaded = run("import sys; old = set(sys.modules); import motet; print(*set(sys.modules) - old)").split()
    assert {name.split(".")[0] for name in loaded} - sys.stdlib_module_names == {"motet"}


def test_importing_the_engine_loads_no_torch():
    loaded = [
        "torch",
        "transformers",
        "tokenizers",
        "numpy",
        "gguf",
        "trio",
        "jinja2",
        "rich",
        "prometheus_client",
        "opentelemetry",
    ]
    assert (
        run(
            f"import sys; from motet import {', '.join(NAMES)}; print([m for m in {loaded} if m in sys.modules])"
        )
        == "[]\n"
    )


def test_importing_the_engine_costs_little_more_than_its_libraries(tmp_path: Path):
    """CPU time of fresh processes, interleaved; the least of several, since other work only ever adds."""
    clock = "import time; t = time.process_time(); {}; print(time.process_time() - t)"
    libraries, ours = (
        "import pydantic, anyio, prometheus_client",
        "from motet import AsyncEngine, SamplingParams",
    )
    times: dict[str, list[float]] = {libraries: [], ours: []}
    for _ in range(8):
        for code, values in times.items():
            # Compiled once, as every installation is, wherever this suite runs from.
            seconds = run(clock.format(code), PYTHONPYCACHEPREFIX=str(tmp_path), PYTHONDONTWRITEBYTECODE="")
            values.append(float(seconds))
    assert min(times[ours]) <= 1.5 * min(times[libraries])
