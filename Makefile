# Everything a person or CI runs. `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EMULATOR := .emulator
ORIGINAL := .fms-hf-tuning
# The clients of the providers of machines, one directory for each file of pinned packages.
VENDORS := $(patsubst tests/vendors/%.txt,.vendors/%/.ready,$(wildcard tests/vendors/*.txt))
PIP_FLAGS := --quiet --disable-pip-version-check
# Tests run in this many processes, each with an emulated cloud of its own; 0 runs all tests in one process. Three
# processes keep two cores busy, because the tests wait for leases and for processes half of their time.
WORKERS ?= 3
# A file's tests stay together and in order. The files' order is in tests/kits/runner/order.py.
# The tests start hundreds of processes, which begin sooner where bytecode is kept.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup setup-tests console-pictures demo demo-rules demo-ring demo-fleet demo-elastic local test suite test-fast nights mutants check style types format bench bench-checkpoint bench-ring bench-fleet bench-console bench-elastic chaos costs synth deploy admin-key constraints openapi clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(VENV)/.ready $(EMULATOR)/.ready console/dist/.ready ## create both environments and the console's page (done by every target that needs them)

setup-tests: setup $(ORIGINAL)/.ready $(VENDORS) .browser/.ready ## and a browser, and the programs that tests and benches compare with

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(EMULATOR)/.ready: functions/local/emulated/emulator.txt
	$(PYTHON) -m venv $(EMULATOR)
	$(EMULATOR)/bin/python -m pip install $(PIP_FLAGS) --requirement functions/local/emulated/emulator.txt
	@touch $@

# IBM's trainer controller, for tests. Not by its own dependencies: it would bring another torch.
$(ORIGINAL)/.ready: tests/kits/ibm/trainer_controller.txt | $(VENV)/.ready
	rm -rf $(ORIGINAL)
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --require-hashes --target $(ORIGINAL) --requirement $<
	@touch $@

define install-vendor
	rm -rf $(@D)
	mkdir -p $(@D)
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --require-hashes --target $(@D) --requirement $<
	@touch $@
endef

.vendors/%/.ready: tests/vendors/%.txt | $(VENV)/.ready
	$(install-vendor)

.vendors/%/.ready: bench/elastic/%.txt | $(VENV)/.ready
	$(install-vendor)

# `find` names folders too, whose times change when a file is removed.
console/dist/.ready: $(shell find console/src) console/build.py console/package-lock.json | $(VENV)/.ready
	$(BIN)/python -m console.build
	@touch $@

.browser/.ready: tests/e2e/console/playwright.txt tests/e2e/console/package-lock.json tests/e2e/console/chromium.py | $(VENV)/.ready
	rm -rf .browser
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --require-hashes --target .browser/packages --requirement $<
	$(BIN)/python -m tests.e2e.console.chromium
	@touch $@

console-pictures: setup-tests ## photograph each view of the console in light, dark and 360 px: see console-pictures/
	$(BIN)/python -m tests.e2e.console.pictures

local: setup ## run the control plane here, until Ctrl-C; keeps its data in .baton/local; ARGS="--port 8788"
	$(BIN)/python -m functions.local $(ARGS)

test: style ## everything CI runs, tests in three processes; WORKERS=4 for four
	$(MAKE) --no-print-directory --jobs 2 types suite

suite: setup-tests
	$(PYTEST)

test-fast: setup-tests ## unit and functional tests only
	$(PYTEST) tests/functional tests/unit

nights: setup-tests ## simulate 1,000 nights of a fleet with faults at every step (about 2 minutes on a quiet machine); NIGHTS=5000 for more
	NIGHTS=$(or $(NIGHTS),1000) $(BIN)/python -m pytest --timeout 3600 tests/unit/fleet/test_random_nights.py

mutants: setup-tests ## break one line of the product at a time, and show that a test fails for each; ARGS="lease ring" for some
	$(BIN)/python -m tests.mutants $(ARGS)

check: style types ## style and types

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

# A minute on one core, in which `make test` begins with the tests.
types: setup
	$(BIN)/mypy

format: setup ## let the formatter decide
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-tests ## measure cost and speed (about 25 minutes on a quiet machine); writes bench-report/
	$(BIN)/python -m bench

bench-checkpoint: setup ## measure checkpoints against the ways of others (about 30 minutes on a quiet machine)
	$(BIN)/python -m bench.checkpoints

bench-ring: setup ## measure the sample ring against raw limits and Wirehead (about 12 minutes on a quiet machine)
	$(BIN)/python -m bench.ring

bench-fleet: setup-tests ## measure the fleets' controller, and money lost in simulated nights (about 8 minutes)
	$(BIN)/python -m bench.fleet

bench-console: setup-tests ## measure the web console in a browser (about 3 minutes on a quiet machine)
	$(BIN)/python -m bench.console

bench-elastic: setup .vendors/torchft/.ready ## measure codecs, engines and failures of elastic trainings (90 minutes; ARGS="--only kills" for a part)
	$(BIN)/python -m bench.elastic $(ARGS)

chaos: setup ## kill and stop 100 real nodes of an elastic training in all phases; ARGS="--seed 7 --faults 30"
	$(BIN)/python -m bench.elastic.chaos $(ARGS)

costs: setup ## count requests and units on the emulated cloud, and write docs/costs.md
	$(BIN)/python -m bench.costs.cost_page --record

openapi: setup ## write functions/api/openapi.json anew
	$(BIN)/python -m functions.api.http.openapi > functions/api/openapi.json

demo: setup ## kill the worker of a real training, resume elsewhere, compare: see demo-report/
	$(BIN)/python -m demo

demo-rules: setup ## let rules stop a diverging training, roll a spiking one back, steer a running one: see demo-report-rules/
	$(BIN)/python -m demo.rules

demo-ring: setup ## train on generated samples while generators are killed, with and without a ring: see demo-report-ring/
	$(BIN)/python -m demo.ring

demo-fleet: setup ## rent machines for a job within a budget, lose one, give all back: see demo-report-fleet/
	$(BIN)/python -m demo.fleet

demo-elastic: setup ## train one model on machines that are killed, freeze and join: see demo-report-elastic/
	$(BIN)/python -m demo.elastic

STAGE ?= dev
CDK := $(BIN)/python -m cdk

synth: setup ## make the stack's template for STAGE=dev, in .cdk/out; needs no account
	$(CDK) synth --stage $(STAGE) $(ARGS)

deploy: setup ## deploy STAGE=dev to the account of AWS_PROFILE and AWS_REGION; ARGS="-c name=value" as in cdk/README.md
	$(CDK) bootstrap --stage $(STAGE) $(ARGS)
	$(CDK) deploy --stage $(STAGE) $(ARGS)

admin-key: setup ## print a new admin key of the deployed STAGE=dev; TENANT=default
	@$(CDK) admin-key --stage $(STAGE) --tenant $(or $(TENANT),default)

constraints: $(VENV)/.ready ## recompute the pinned versions
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header --all-extras \
	  --no-emit-package torch --no-emit-package baton --no-emit-package setuptools \
	  --output-file constraints.txt $(CONSTRAINTS_FLAGS) pyproject.toml
	@# torch is taken from a range: only the worker's image gets the CUDA build, and what that brings
	sed -i -E '/^(nvidia-|cuda-|triton)/d' constraints.txt
	$(BIN)/python gpu_client/requirements.py dreambooth | $(BIN)/uv pip compile --quiet --python-version 3.12 \
	  --python-platform x86_64-manylinux_2_28 --no-annotate --no-header --constraint constraints.txt $(CONSTRAINTS_FLAGS) - \
	  | grep -E '^(torch|triton|setuptools|nvidia-[a-z0-9-]+|cuda-[a-z-]+)==' > gpu_client/cuda.txt
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header \
	  --output-file functions/local/emulated/emulator.txt $(CONSTRAINTS_FLAGS) functions/local/emulated/emulator.in

clean: ## remove environments and everything generated; what `make local` keeps stays
	rm -rf $(VENV) $(EMULATOR) $(ORIGINAL) .vendors console/dist console/node_modules console-pictures .browser .cdk .kelpie .wirehead .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-report demo-report-rules demo-report-ring demo-report-fleet demo-report-elastic bench-report baton.egg-info
