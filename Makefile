# Slow suites and benchmarks. The default test run is plain `pytest`; CI runs the short forms.
.PHONY: check slow fault bench bench-small
check:            ## lint, format, types, rooms
	ruff check .
	ruff format --check .
	pyright
	lint-imports
slow:             ## every shipped YAML in full, tens of minutes
	pytest -m slow
fault:            ## processes killed on purpose
	pytest -m fault
bench:            ## figures of docs/measurements.md; run on an idle machine
	python benchmarks/step.py
	python benchmarks/driver.py
	python benchmarks/utilisation.py
bench-small:      ## the same scripts, seconds each
	python benchmarks/step.py --small
	python benchmarks/driver.py --small
	python benchmarks/utilisation.py --small
