# Two commands do everything on a fresh machine with Python 3.11:
#   make quickstart   set up and run the main job: SFT warm-up, GRPO, evaluation, conversion
#   make test         set up and pass lint, types and tests
# And for contributors:
#   make check        lint and the quick tests, of one folder of tests with ROOM=store
#   make campaign     what takes minutes: kills, the wheel, other environments, walks through pages
SEED ?= 42
OUT ?= runs/quickstart
WORKERS ?= 2
export SEED OUT
PY := .venv/bin/python
# A run is many processes, and each would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install dev quickstart test tests check campaign lint generated docs clean
help:
	@grep -E '^#   ' Makefile | cut -c3-

install:
	@requirements/install.sh

dev:
	@requirements/install.sh dev

quickstart: install
	@.venv/bin/trinity quickstart --out "$$OUT" --seed "$$SEED"

lint: dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# mypy has one core busy for two minutes: the tests run beside it.
test: dev
	@$(MAKE) --no-print-directory -j 2 lint tests

# Two processes share the tests: most of them wait for others to start (WORKERS=3 takes up to 16 GiB). Each has one thread
# for torch: for the tests' small models a second costs a tenth more. What they start takes the threads that its run gives
# it, and those wait asleep.
# One that crashes fails its test, and is not replaced: xdist would run the same test again, up to nine times.
PYTEST := MAKEFLAGS= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -q -n $(WORKERS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
tests:
	$(PYTEST) -m "not campaign"

check: dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(PYTEST) -m "not slow and not campaign" tests/$(ROOM)

campaign: dev
	@requirements/data-juicer.sh || echo "install: without Data-Juicer; its tests will be skipped" >&2
	@requirements/separate.sh games frameworks agentscope docs || echo "install: tests of what is missing will be skipped" >&2
	$(PYTEST) -m campaign

# What is made from the code and kept beside it; tests fail while it is stale.
generated:
	$(PY) -m trinity_core.config.reference docs/configuration.md
	$(PY) -m trinity_core.cli schema --json > configs/schema.json

# The pages as a site: build/site/index.html.
docs: install
	@requirements/separate.sh docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

clean:
	rm -rf .venv .venv-* runs checkpoints
