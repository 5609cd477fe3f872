# Each target sets up what it needs in $(VENV) and does nothing twice; `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= models/demo
ARGS ?=
URL ?= http://127.0.0.1:8000
# The CUDA extra to serve and test with: cuda12 where an NVIDIA driver answers (newer drivers run it
# too), nothing elsewhere. `make serve CUDA=cuda13` chooses, `CUDA=` forces the CPU build.
CUDA ?= $(shell nvidia-smi >/dev/null 2>&1 && echo cuda12)

# What a GPU needs beside packages: compiled kernels, if there are none yet of any `make aot`.
KERNELS = $(if $(strip $(CUDA)),triton_aot/manifest.json)

BIN := $(VENV)/bin
PIN := requirements/constraints.txt
comma := ,
extras = $(if $(strip $(1)),[$(subst $() ,$(comma),$(strip $(1)))])

# $(call install,stamp name,extras): this checkout, editable, at the pinned versions.
define install
$(VENV)/.installed-$(strip $(1)): pyproject.toml $(PIN) | $(BIN)/python
	$(BIN)/python -m pip install -q -c $(PIN) -e '.$$(call extras,$(2))'
	@touch $$@
endef

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

serve: $(VENV)/.installed-serve$(CUDA) $(KERNELS)  ## serve MODEL=DIR (default: the demo model) with ARGS
	$(BIN)/deltaserve serve --model-path $(MODEL) $(ARGS)

test: $(VENV)/.installed-test  ## the tests that need neither a GPU nor torch
	$(BIN)/python -m pytest -m 'not gpu and not hf and not aot and not clients' $(ARGS)

test-hf: $(VENV)/.installed-test-hf  ## the comparisons with transformers on CPU torch
	$(BIN)/python -m pytest -m 'hf and not gpu and not aot' $(ARGS)

test-clients: $(VENV)/.installed-test-clients  ## other projects' clients against the server
	$(BIN)/python -m pytest -m clients $(ARGS)

test-aot: $(VENV)/.installed-test-aot  ## the Triton kernels in Triton's interpreter, on the CPU
	$(BIN)/python -m pytest -m aot $(ARGS)

test-gpu: $(VENV)/.installed-test-gpu$(CUDA) $(KERNELS)  ## the tests that need an NVIDIA GPU
	@nvidia-smi >/dev/null || { echo 'make test-gpu needs an NVIDIA GPU' >&2; exit 1; }
	$(BIN)/python -m pytest -m gpu $(ARGS)

check-gpu: $(VENV)/.installed-test-gpu$(CUDA) $(KERNELS)  ## all checks of an NVIDIA GPU, on from where they ended
	@nvidia-smi >/dev/null || { echo 'make check-gpu needs an NVIDIA GPU' >&2; exit 1; }
	$(BIN)/python -m tools.gpu_suite $(ARGS)

lint: $(VENV)/.installed-dev build/mypy/deltaserve  ## ruff, mypy, and what tools/check_tree.py holds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p deltaserve.engine -p deltaserve.server -p tools
	$(BIN)/python tools/check_tree.py

bench: $(VENV)/.installed-serve$(CUDA)  ## the table of budgets, over HTTP, of the server at URL
	$(BIN)/python -m tools.bench_serving --url $(URL) --table $(ARGS)

bench-engine: $(VENV)/.installed-serve$(CUDA) $(KERNELS)  ## the engine without HTTP, on MODEL=DIR
	$(BIN)/python -m tools.bench_engine --model-path $(MODEL) $(ARGS)

aot: $(VENV)/.installed-aot  ## compile the kernels for every architecture (needs no GPU)
	$(BIN)/python triton_aot/build.py $(ARGS)

# For the architectures of this machine's GPUs; for all where nothing tells them.
triton_aot/manifest.json: | $(VENV)/.installed-aot
	$(BIN)/python triton_aot/build.py $(addprefix --arch sm_,$(sort $(subst .,,$(shell \
	    nvidia-smi --query-gpu=compute_cap --format=csv$(comma)noheader 2>/dev/null))))

clean:  ## remove everything that make made
	rm -rf $(VENV) build dist deltaserve.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(eval $(call install,serve$(CUDA),$(CUDA)))
$(eval $(call install,test,test))
$(eval $(call install,test-hf,test-hf))
$(eval $(call install,test-clients,test-clients))
$(eval $(call install,test-gpu$(CUDA),test-hf $(CUDA)))
$(eval $(call install,dev,dev))
$(eval $(call install,aot,aot $(or $(CUDA),cuda12)))
$(eval $(call install,test-aot,test-hf aot))

# The packages under their installed names, for mypy (see pyproject.toml).
build/mypy/deltaserve:
	mkdir -p $@
	ln -sfn ../../../engine $@/engine
	ln -sfn ../../../server $@/server

# pip installs into one environment at a time.
.NOTPARALLEL:

.PHONY: help serve test test-hf test-clients test-aot test-gpu check-gpu lint bench bench-engine aot clean
