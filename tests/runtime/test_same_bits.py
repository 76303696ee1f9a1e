"""A request's answer has the same bits whatever stands beside it: natively, in every format, log-probabilities too.

What it is compared with is its own answer alone, on one thread, its prompt in one piece and no step replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.config import EngineConfig
from motet.kernels.cpu.library import usable_isas
from motet.params import SamplingParams
from motet.runtime import recorded_steps
from motet.runtime.build import build_runtime
from motet.runtime.request import FinishReason, Request
from motet.runtime.scheduler_output import Sample
from tests.runtime.models.gguf_models import QuantisationType, write_gguf
from tests.runtime.models.tiny_models import make_hf_model, save_folder
from tests.tiny import save_adapter

pytestmark = pytest.mark.skipif(not usable_isas(), reason="no C++ compiler at installation")

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "float32", "quantization": "int4"},
    "gguf": {"dtype": "bfloat16", "quantization": "gguf"},
}

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    # Longer than what products unpack at once; nothing is a multiple of a vector.
    "llama": (16, {"hidden_size": 264, "intermediate_size": 530, "head_dim": 20, "vocab_size": 259}),
    # Windows and softcaps, and blocks that end within a tile.
    "gemma2": (5, {"num_attention_heads": 6, "vocab_size": 97}),
    # Blocks of 32 weights: by fours, by eights, and both kinds of fours in one product.
    "llama.gguf": (
        16,
        {
            "hidden_size": 320,
            "intermediate_size": 544,
            "num_attention_heads": 16,
            "head_dim": 20,
            "vocab_size": 259,
        },
    ),
}
"""By family, and the file's format if that is not a folder: the KV block size, and the shape."""

BLOCKS = {"token_embd": "Q8_0", "attn_k": "Q4_0", "ffn_down": "Q8_0"}
"""What is not in Q4_1 in the GGUF."""

CASES = [
    *(("llama.gguf" if format == "gguf" else "llama", format) for format in FORMATS),
    ("gemma2", "bfloat16"),
    ("gemma2", "int4"),
]

RANKS = (1, 5, 16, 37)
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 65, 100, 700)
"""Of prompts: around blocks and tiles; more than the 512 tokens that attention takes in one stretch."""

NUM_TOKENS = 9


class Question(NamedTuple):
    prompt: list[int]
    adapter: str | None


class Answer(NamedTuple):
    samples: list[Sample]
    prompt_logprobs: list[dict[int, float] | None]


class Model(NamedTuple):
    source: Path | str
    adapters: dict[str, Path]
    block_size: int
    questions: list[Question]


class Engine:
    """A runtime driven by hand, its adapters loaded."""

    def __init__(self, model: Model, **config: Any) -> None:
        config = {"kv_cache_bytes": 64 << 20, "block_size": model.block_size} | config
        self.runtime = build_runtime(model.source, EngineConfig(**config), self._release)
        for name, folder in model.adapters.items():
            self.runtime.adapter_loader.load(name, folder)
        self.runtime.adapter_loader.run_jobs()
        self._samples: dict[int, list[Sample]] = {}

    def _release(self, request: Request) -> None:
        if request.adapter is not None:
            self.runtime.adapters.release(request.adapter)

    def add(self, question: Question, *, prompt_logprobs: bool = True) -> Request:
        adapter = None if question.adapter is None else self.runtime.adapters.acquire(question.adapter)
        params = SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1 if prompt_logprobs else None
        )
        request = self.runtime.intake.make_request(
            params, tenant="t", adapter=adapter, priority=0, deadline=None
        )
        request.set_prompt(question.prompt, None)
        self.runtime.core.scheduler.add(request)
        self._samples[request.request_id] = []
        return request

    @property
    def has_work(self) -> bool:
        return self.runtime.core.has_work

    def step(self) -> None:
        for delta in self.runtime.core.step():
            assert delta.sample is not None, delta.request.error
            self._samples[delta.request.request_id].append(delta.sample)

    def ask(self, questions: Sequence[Question], *, prompt_logprobs: bool = True) -> list[Request]:
        """All at once."""
        requests = [self.add(question, prompt_logprobs=prompt_logprobs) for question in questions]
        while self.has_work:
            self.step()
        return requests

    def answer(self, request: Request) -> Answer:
        return Answer(self._samples[request.request_id], request.prompt_logprobs)

    @property
    def num_recordings(self) -> int:
        return len(self.runtime.core._runner._steps._replays)  # type: ignore[attr-defined]


def ask(questions_of: Sequence[Sequence[int]], adapters: Sequence[str]) -> list[Question]:
    """Each prompt twice, of the base model and the adapters in turn."""
    names = [None, *adapters]
    return [
        Question(list(p), names[(i + k) % len(names)]) for i, p in enumerate(questions_of) for k in (0, 1)
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @cache
    def make(name: str) -> Model:
        block_size, shape = MODELS[name]
        family, _, file_format = name.partition(".")
        hf_model = make_hf_model(family, max_position_embeddings=1024, tie_word_embeddings=False, **shape)
        folder = tmp_path_factory.mktemp(name)
        adapters = {
            f"r{rank}": save_adapter(hf_model, folder / f"r{rank}", rank=rank, seed=rank, strength=2.0)
            for rank in RANKS
        }
        ids = shape["vocab_size"] - 3
        prompts = [
            [3 + (i * i + 5 * j * j + 3 * i * j) % ids for j in range(n)] for i, n in enumerate(LENGTHS)
        ]
        base = save_blocks(hf_model, folder) if file_format else save_folder(hf_model, folder / "base")
        return Model(base, adapters, block_size, ask(prompts, list(adapters)))

    return make


def save_blocks(hf_model: Any, folder: Path) -> Path:
    types = {end: QuantisationType[kind] for end, kind in BLOCKS.items()}
    return write_gguf(folder / "base.gguf", hf_model, weight_type=QuantisationType.Q4_1, types=types)


class Case(NamedTuple):
    """A model in one format, and what each question is answered with alone."""

    model: Model
    format: dict[str, Any]
    alone: list[Answer]

    @classmethod
    def of(cls, model: Model, format: dict[str, Any]) -> Case:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recorded_steps, "MAX_ROWS", 0)
            engine = Engine(
                model, threads=1, max_num_batched_tokens=4096, enable_prefix_caching=False, **format
            )
            alone = [engine.answer(*engine.ask([question])) for question in model.questions]
            assert engine.num_recordings == 0
        return cls(model, format, alone)

    def engine(self, **config: Any) -> Engine:
        return Engine(self.model, **self.format, **config)

    def check(self, engine: Engine, which: Sequence[int], **how: Any) -> list[Request]:
        """Asks these questions at once."""
        requests = engine.ask([self.model.questions[i] for i in which], **how)
        for i, request in zip(which, requests, strict=True):
            self.compare(i, engine.answer(request))
        return requests

    def compare(self, which: int, answer: Answer) -> None:
        alone = self.alone[which]
        for i, (sample, expected) in enumerate(zip(answer.samples, alone.samples, strict=True)):
            assert sample == expected, f"question {which}, token {i}"
        if answer.prompt_logprobs:
            assert answer.prompt_logprobs == alone.prompt_logprobs, f"question {which}"


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Case:
    model, format = request.param
    case = Case.of(models(model), FORMATS[format])
    firsts = {answer.samples[0].logprob for answer in case.alone}
    assert len(firsts) == len(case.alone), "questions are told apart by their answers"
    return case


def short(case: Case) -> list[int]:
    """The questions that take few steps."""
    return [i for i, question in enumerate(case.model.questions) if len(question.prompt) <= 100]


@pytest.mark.parametrize(("threads", "sizes"), [(1, (3, 64)), (2, (2, 8, 31, 64))])
def test_in_batches_of_2_to_64_beside_other_adapters(
    case: Case, threads: int, sizes: tuple[int, ...]
) -> None:
    engine = case.engine(threads=threads, max_num_batched_tokens=8192, enable_prefix_caching=False)
    for size in sizes:
        case.check(engine, [i % len(case.alone) for i in range(size, 2 * size)])
    assert engine.num_recordings >= len(sizes), "steps are replayed"


@pytest.mark.parametrize(("budget", "threads"), [(1, 2), (7, 1), (7, 2), (50, 2), (300, 1)])
def test_in_chunks_of_any_size(case: Case, budget: int, threads: int) -> None:
    engine = case.engine(
        threads=threads,
        max_num_batched_tokens=budget,
        max_num_seqs=min(budget, 12),
        enable_prefix_caching=False,
    )
    case.check(engine, range(len(case.alone)) if budget >= 50 else short(case)[: 6 * budget])


@pytest.mark.parametrize("threads", [1, 2])
def test_preempted(case: Case, threads: int) -> None:
    itemsize = 2 if case.format["dtype"] == "bfloat16" else 4
    engine = case.engine(
        threads=threads, kv_cache_bytes=150 * 2 * 2 * 2 * 20 * itemsize, max_num_batched_tokens=60
    )
    requests = case.check(engine, short(case))
    assert sum(request.num_preemptions for request in requests) >= 2


def test_from_the_prefix_cache(case: Case) -> None:
    engine = case.engine(threads=2)
    case.check(engine, range(len(case.alone)))
    again = case.check(engine, range(len(case.alone)), prompt_logprobs=False)
    assert sum(request.num_cached_tokens > 0 for request in again) >= 8


arrivals = st.lists(
    st.tuples(
        st.integers(0, 2 * len(LENGTHS) - 3),  # which question; not the longest
        st.integers(0, 4),  # steps until it comes
        st.booleans(),  # prompt_logprobs
        st.none() | st.integers(1, 12),  # steps until it is aborted
    ),
    min_size=1,
    max_size=20,
)


@settings(max_examples=6, deadline=None)
@given(
    arrivals=arrivals,
    threads=st.sampled_from([1, 2]),
    budget=st.integers(4, 200),
    max_num_seqs=st.integers(1, 16),
    tokens=st.integers(130, 600),
    caching=st.booleans(),
)
def test_whatever_comes_and_goes_meanwhile(
    case: Case,
    arrivals: list[tuple[int, int, bool, int | None]],
    threads: int,
    budget: int,
    max_num_seqs: int,
    tokens: int,
    caching: bool,
) -> None:
    itemsize = 2 if case.format["dtype"] == "bfloat16" else 4
    engine = case.engine(
        threads=threads,
        max_num_batched_tokens=budget,
        max_num_seqs=min(max_num_seqs, budget),
        kv_cache_bytes=tokens * 2 * 2 * 2 * 20 * itemsize,
        enable_prefix_caching=caching,
    )
    asked: list[tuple[int, Request]] = []
    leaving: list[tuple[int, Request]] = []
    clock = 0

    def step() -> None:
        nonlocal clock
        clock += 1
        for when, request in leaving:
            if when == clock:
                engine.runtime.core.scheduler.finish(request.request_id, FinishReason.ABORT)
        if engine.has_work:
            engine.step()

    for which, gap, prompt_logprobs, patience in arrivals:
        for _ in range(gap):
            step()
        request = engine.add(case.model.questions[which], prompt_logprobs=prompt_logprobs)
        asked.append((which, request))
        if patience is not None:
            leaving.append((clock + patience, request))
    while engine.has_work:
        step()
    for which, request in asked:
        if request.finish_reason is not FinishReason.ABORT:
            case.compare(which, engine.answer(request))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("format", FORMATS)
def test_the_demo_model_too(format: str) -> None:
    folder = Path(__file__).parents[2] / "examples" / "adapters"
    adapters = {path.name: path for path in sorted(folder.iterdir()) if path.is_dir()}
    prompts = [
        [7 + (i * i + 5 * j * j + 3 * i * j) % 40_000 for j in range(n)] for i, n in enumerate(LENGTHS)
    ]
    case = Case.of(Model("demo", adapters, 16, ask(prompts, list(adapters))), FORMATS[format])
    everything = range(len(case.alone))
    for threads in (1, 2):
        engine = case.engine(threads=threads, enable_prefix_caching=False)
        for size in (2, 8, 64):
            case.check(engine, [i % len(everything) for i in range(size)])
        case.check(case.engine(threads=threads, max_num_batched_tokens=7, max_num_seqs=6), short(case))
    itemsize = 2 if case.format["dtype"] == "bfloat16" else 4
    kv_cache_bytes = 9 * 16 * 2 * 30 * 3 * 64 * itemsize  # two of the longer ones would fill it
    engine = case.engine(threads=2, kv_cache_bytes=kv_cache_bytes, max_num_batched_tokens=60)
    assert sum(request.num_preemptions for request in case.check(engine, short(case))) >= 2
    engine = case.engine(threads=2, kv_cache_bytes=256 << 20)  # all of them
    for _ in range(2):
        requests = case.check(engine, everything, prompt_logprobs=False)
    assert sum(request.num_cached_tokens > 0 for request in requests) >= 8
