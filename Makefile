# The course in a few commands. `make` alone lists them.

PYTHON ?= python3
VENV_PYTHON := $(CURDIR)/.venv/bin/python
SETUP = @command -v "$(PYTHON)" >/dev/null || { echo "There is no '$(PYTHON)' here. Name a Python 3.10 or newer: make lab PYTHON=python3.12" >&2; exit 1; }; \
	"$(PYTHON)" tools/make_venv.py

# Jupyter, IPython and matplotlib keep their settings inside .venv: the user's own stay as they
# are, and none of them (a kernel of the same name, a startup file) changes what a notebook prints.
export JUPYTER_PATH := $(CURDIR)/.venv/share/jupyter
export JUPYTER_CONFIG_DIR := $(CURDIR)/.venv/jupyter/config
export JUPYTER_DATA_DIR := $(CURDIR)/.venv/jupyter/data
export JUPYTER_RUNTIME_DIR := $(CURDIR)/.venv/jupyter/runtime
export IPYTHONDIR := $(CURDIR)/.venv/jupyter/ipython
export MPLCONFIGDIR := $(CURDIR)/.venv/jupyter/matplotlib
unexport MPLBACKEND PYTHONPATH PYTHONHOME
export PIP_ARGS

# Only this machine can connect, nothing asks for news or looks for language servers (npm would
# write to the user's home), and root (a container) may start it.
LAB_FLAGS = --ServerApp.ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" \
	--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb \
	--LabApp.app_settings_dir="$(CURDIR)/tools/lab" --LabApp.news_url=None \
	--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate \
	--LanguageServerManager.autodetect=False --KernelManager.transport_encryption=auto \
	$(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help lab test notebooks conformance browser-test bench clean course all-extras

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' Makefile

lab: course ## set up .venv if needed and open the course in JupyterLab (LAB_ARGS="--no-browser --port=8899")
	@# Lab shows no stored pictures of a notebook that is not trusted.
	@find notebooks -name '*.ipynb' -exec "$(VENV_PYTHON)" -m jupyter trust {} + >/dev/null
	@"$(VENV_PYTHON)" -m jupyterlab $(LAB_FLAGS) $(LAB_ARGS)

test: all-extras ## lint, every test, and every notebook's stored outputs (PARTS="lint pytest nbval")
	@"$(VENV_PYTHON)" tools/run_tests.py $(PARTS)

notebooks: all-extras ## run all notebooks again and store their outputs (NOTEBOOKS="notebooks/01*.ipynb")
	@"$(VENV_PYTHON)" tools/run_notebooks.py $(NOTEBOOKS)

conformance: all-extras ## torch's own DDP tests against our class
	@"$(VENV_PYTHON)" -m pytest tests/conformance

browser-test: all-extras ## the notebooks as seen in JupyterLab (SCREENSHOTS=folder keeps what was seen)
	@"$(VENV_PYTHON)" -m pytest tests/browser

bench: all-extras ## time the bare model, torch's class and ours side by side (BENCH_ARGS=--json)
	@"$(VENV_PYTHON)" -m ddp_teach.bench $(BENCH_ARGS)

clean: ## remove .venv and everything else that was made here
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -prune -exec rm -rf {} + -o -name .ipynb_checkpoints -prune -exec rm -rf {} +

course:
	$(SETUP) course

all-extras:
	$(SETUP) course test
