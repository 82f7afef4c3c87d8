# Everything runs in environments of its own under .venv/, made from nothing.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
PIP = pip install --quiet --disable-pip-version-check
PYTEST_ARGS ?= -m "not slow"
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test test-slow test-modern test-classic bench mutants kills soak audits battery lint format clean

demo: $(VENV)/demo/ready
	$(VENV)/demo/bin/python examples/demo.py

test: lint test-modern test-classic

test-slow:
	$(MAKE) test-modern test-classic PYTEST_ARGS="-m slow"

test-modern: $(VENV)/modern/ready
	$(VENV)/modern/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

test-classic: $(VENV)/classic/ready
	$(VENV)/classic/bin/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

BENCH_RESULTS ?= build/benchmarks.json
bench: $(VENV)/modern/ready $(VENV)/classic/ready $(VENV)/torch/ready $(VENV)/jax/ready
	mkdir -p $(dir $(BENCH_RESULTS)) docs
	$(VENV)/modern/bin/python benchmarks/run.py --environments $(VENV) --output $(BENCH_RESULTS)
	$(VENV)/modern/bin/python benchmarks/report.py $(BENCH_RESULTS) docs/benchmarks.md

# Bugs that break privacy, put into a copy of the code one at a time; see tests/mutants/catalogue.py.
mutants: $(VENV)/modern/ready
	$(VENV)/modern/bin/python tests/mutants/run.py --output docs/mutants.md

# Training killed at random moments, a million steps, 200 audits of each optimizer, a billion normals.
kills soak audits battery: $(VENV)/modern/ready
	$(VENV)/modern/bin/python tests/campaigns/$@.py --output docs/$@.md

lint: $(VENV)/modern/ready
	$(VENV)/modern/bin/ruff check .
	$(VENV)/modern/bin/ruff format --check .

format: $(VENV)/modern/ready
	$(VENV)/modern/bin/ruff check --fix .
	$(VENV)/modern/bin/ruff format .

$(VENV)/demo/ready: setup.py
	$(PYTHON) -m venv $(VENV)/demo
	$(VENV)/demo/bin/$(PIP) ".[plots]"
	touch $@

# `-c`: the versions of everything that is installed, so that a test that turns red has a cause of our own.
$(VENV)/modern/ready: setup.py requirements/modern.txt requirements/dev.txt requirements/modern-versions.txt
	$(PYTHON) -m venv $(VENV)/modern
	$(VENV)/modern/bin/$(PIP) -c requirements/modern-versions.txt -r requirements/modern.txt -r requirements/dev.txt ruff
	$(VENV)/modern/bin/$(PIP) --no-deps -e .
	touch $@

$(VENV)/classic/ready: setup.py requirements/classic.txt requirements/classic-no-deps.txt requirements/dev.txt \
		requirements/classic-versions.txt
	$(PYTHON) -m venv $(VENV)/classic
	$(VENV)/classic/bin/$(PIP) -c requirements/classic-versions.txt -r requirements/classic.txt
	$(VENV)/classic/bin/$(PIP) --no-deps -r requirements/classic-no-deps.txt
	$(VENV)/classic/bin/$(PIP) -c requirements/classic-versions.txt -r requirements/classic.txt -r requirements/dev.txt
	$(VENV)/classic/bin/$(PIP) --no-deps --no-build-isolation -e .
	touch $@

# Contenders of `make bench` alone.
$(VENV)/torch/ready $(VENV)/jax/ready: $(VENV)/%/ready: requirements/%.txt requirements/%-versions.txt
	$(PYTHON) -m venv $(VENV)/$*
	$(VENV)/$*/bin/$(PIP) -c requirements/$*-versions.txt -r $<
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
