# Two commands do everything on a fresh machine with Python 3.11:
#   make quickstart   set up and run the main job: SFT warm-up, GRPO, evaluation, conversion
#   make test         set up and pass lint, types and tests
SEED ?= 42
OUT ?= runs/quickstart
export SEED OUT
PY := .venv/bin/python

.PHONY: help install dev quickstart test lint clean
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

# The fast tests run beside the slow ones, which mostly wait for one another's processes; their report comes last.
test: lint
	@mkdir -p build
	@$(PY) -m pytest -q -m "not slow" >build/fast_tests.log 2>&1 & \
	beside=$$!; trap "kill $$beside; exit 130" INT TERM; \
	$(PY) -m pytest -q -m slow; slow=$$?; \
	wait $$beside; fast=$$?; \
	cat build/fast_tests.log; exit $$((slow || fast))

clean:
	rm -rf .venv runs checkpoints
