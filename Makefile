# The front door: `make` lists what there is. CI runs `.ci/run`, which runs `make test`.

PYTHON ?= python3
PY := .venv/bin/python
# What services and the demo run on; the packages of the Kinesis emulator; those of checks and tests.
RUN := .venv/.run-done
EMULATOR := .venv/.emulator-done
STAMP := .venv/.setup-done
# More than two cores: most tests of real processes wait, for a lease that ends, a process that starts, a heartbeat that is missed.
WORKERS ?= 5

# Some machines forbid Python to keep compiled files. Then every worker and every service that a test starts compiles all of it.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install setup jars emulator clients check unit test demo bench soak simulate sbom release clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(RUN)  ## .venv with what Penstock runs on, and a Java if there is none; quick when nothing changed

setup: $(STAMP) jars emulator clients  ## install, and what checks and tests need: packages, the jars, a Kinesis emulator

$(RUN): pyproject.toml $(foreach name,build services java,infra/lock/$(name).txt) infra/dev/setup.sh
	@PYTHON="$(PYTHON)" infra/dev/setup.sh
	@touch $@

$(EMULATOR): $(RUN) infra/lock/emulator.txt
	@infra/dev/setup.sh emulator
	@touch $@

$(STAMP): $(EMULATOR) infra/lock/dev.txt
	@infra/dev/setup.sh dev
	@touch $@

jars: $(RUN)
	@$(PY) -m services.core.jvm.jars
	@$(PY) -m spark.jvm.classes > /dev/null

emulator: $(EMULATOR)
	@infra/dev/node.sh
	@$(PY) -m services.core.aws_emulator

# Clients of schema registries for Node, which tests run against ours.
clients: $(STAMP)
	@infra/dev/node.sh
	@$(PY) -m tests.support.schema_clients

check: $(STAMP)  ## format, lint, types, import rules
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports

# For the edit loop: no Java, no Kafka, no histories by the thousand. ARGS="tests/unit/expel" runs a part.
unit: $(STAMP)  ## most unit tests, in about a minute
	@$(PY) -m pytest -q -n 3 -m "not long" $(or $(ARGS),tests/unit)

# Tests that need Kafka share one cluster and run in one worker, those that need Spark in another (tests/support/workers.py).
# The archives of classes take a minute once, and so do the types in a new clone; each has one core.
# TURNS=all: also the long tests that have their turn on another day (tests/support/turns.py).
test: setup  ## every check, and the tests, real Kafka among them; TURNS=all
	@$(PY) -m tests.support.class_archives & archives=$$!; \
	$(MAKE) --no-print-directory check; checked=$$?; \
	wait $$archives && exit $$checked
	@infra/dev/test_tools.sh
	@$(if $(TURNS),PENSTOCK_TEST_TURNS=$(TURNS)) $(PY) -m pytest -n $(WORKERS)
	@test "$(TURNS)" != all || test -n "$$(git status --porcelain)" || git rev-parse 'HEAD^{tree}' > .venv/.tested || true  # for make release

# On the embedded log it needs no jars; on Kafka it fetches them itself, once.
demo: $(RUN) $(if $(findstring kinesis,$(ARGS)),emulator)  ## the fleet, end to end, on real events; ARGS="--broker kinesis", ARGS=--chaos, ARGS=--json
	@$(PY) -m services.fleet demo $(ARGS)

bench: setup  ## every figure beside its floor, on a real Kafka; ARGS=--json, ARGS="--only ingest"
	@$(PY) -m bench $(ARGS)

# Not part of `make test`: it takes as long as you say, and Kafka needs the jars. ARGS=--upgrade: the last release, this version, and back.
soak: setup  ## the whole path under random kills; ARGS="--minutes 10 --rate 2000 --broker kafka"
	@$(PY) -m tests.faults.soak $(ARGS)

# Endless; one seed is one history. ARGS="--seed 42" replays one, ARGS=--prove takes each mend out and finds its fault.
simulate: $(STAMP)  ## the whole fleet in one process on a virtual clock, seed after seed; ARGS="--seed 42", ARGS=--prove
	@$(PY) -m tests.simulation $(ARGS)

sbom:  ## dist/penstock.cdx.json: every locked package, jar and npm module, as CycloneDX
	@$(PYTHON) infra/dev/sbom.py

# VERSION=0.2.0; ARGS=--dry-run, ARGS=--unsigned, ARGS=--untested. It never pushes.
release: $(STAMP)  ## wheel, bill of materials, image, SHA256SUMS and a signed tag: make release VERSION=0.2.0
	@$(PY) infra/dev/release.py $(or $(VERSION),"") $(ARGS)

clean:  ## removes .venv and every cache in this folder; the jars outside stay
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
