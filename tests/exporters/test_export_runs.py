"""Exported folders are run on a CPU: they train, and to the metrics of our own trial."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gdpo_tune.exporters.write_export import export_training
from gdpo_tune.training import train
from tests.support.export import export_to, flatten, make_recipe, make_request, parse_settings
from tests.support.packages import install_library

CHOSEN = (
    "space.normalization=gdpo",
    "space.group_size=8",
    "space.learning_rate=1.5e-4",
    "space.reward_weights.format=0.5",
    "space.reward_weights.length=0.3",
)
SEEDS = (0, 1, 2)
SPACES = ("code", "math", "tools")
INSTALLED_FOR_TESTS = ("ms-swift", "axolotl")
"""Libraries with an environment of their own, beside TRL, which is installed here."""
SHORT = {
    "trl": ("--max_steps", "4", "--logging_steps", "1"),
    "ms-swift": ("--max_steps", "4", "--logging_steps", "1"),
    "axolotl": ("--max-steps", "4", "--logging-steps", "1"),
}


@pytest.fixture(scope="module")
def find_programs(tmp_path_factory):
    """A function that returns the directory with the programs of a library's environment.

    The environment variable GDPO_TUNE_LIBRARIES names a directory that keeps what was installed.
    """
    kept = os.environ.get("GDPO_TUNE_LIBRARIES")
    directory = Path(kept) if kept else tmp_path_factory.mktemp("environments")
    return lambda library, exported: install_library(exported.install, directory / library)


@pytest.fixture(scope="module")
def run_folder(find_programs):
    """A function that starts a folder as a person does, and returns what the library printed."""

    def run(library, exported, directory, *arguments, status=0):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if library in INSTALLED_FOR_TESTS:
            programs = find_programs(library, exported)
            environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
            environment |= {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        command = ["bash", str(directory / "run.sh"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        printed = done.stdout + done.stderr
        assert done.returncode == status, printed[-4000:]
        return printed

    return run


CASES = [
    # as code, to TRL, in the second step of CI
    *(pytest.param("trl", space, marks=[pytest.mark.system, pytest.mark.slow]) for space in SPACES),
    *(
        pytest.param(library, space, marks=pytest.mark.slow)
        for library in INSTALLED_FOR_TESTS
        for space in SPACES
    ),
]


@pytest.mark.parametrize(("library", "space"), CASES)
def test_a_folder_trains_on_a_cpu(run_folder, tmp_path, library, space):
    request = make_request(("training.train_prompts=64",), space)
    exported, directory = export_training(request, library, "", tmp_path / "out")
    run_folder(library, exported, directory, *SHORT[library])
    checkpoint = directory / f"{space}-train" / "checkpoint-4"
    assert (checkpoint / "model.safetensors").is_file()
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    logged = state["log_history"][:4]
    assert [row["step"] for row in logged] == [1, 2, 3, 4]
    for reward in ("correctness", "format", "length"):
        assert all(f"rewards/{reward}/mean" in row for row in logged)
    assert any(row["grad_norm"] > 0 for row in logged)


@pytest.mark.slow
@pytest.mark.parametrize("library", INSTALLED_FOR_TESTS)
def test_a_folder_trains_adapters(run_folder, tmp_path, library):
    changes = ("model.lora_rank=8", "space.beta=0.01", "training.mini_batch_size=32")
    request = make_request((*changes, "training.train_prompts=64"))
    exported, directory = export_training(request, library, "", tmp_path / "out")
    run_folder(library, exported, directory, *SHORT[library])
    checkpoint = directory / "code-train" / "checkpoint-4"
    assert (checkpoint / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_ms_swift_refuses_an_argument_that_it_does_not_know(run_folder, tmp_path):
    request = make_request(("training.train_prompts=64",))
    exported, directory = export_training(request, "ms-swift", "", tmp_path / "out")
    printed = run_folder("ms-swift", exported, directory, "--no_such_key", "1", status=1)
    assert "remaining_argv: ['--no_such_key', '1']" in printed  # and no key of the file


PARSE = """
import json, sys
from axolotl.utils.schemas.config import AxolotlInputConfig
config = AxolotlInputConfig(**json.load(sys.stdin))
print(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES)
def test_axolotl_knows_every_key(find_programs, space):
    exported = export_to("axolotl", make_recipe(request=make_request((), space)))
    written = parse_settings(exported)
    python = find_programs("axolotl", exported) / "python"
    command = [str(python), "-c", PARSE]
    text = subprocess.check_output(command, input=json.dumps(written), text=True)
    read = json.loads(text.splitlines()[-1])
    datasets = zip(written.pop("datasets"), read.pop("datasets"), strict=True)
    assert all(row.items() <= parsed.items() for row, parsed in datasets)
    assert flatten(written).items() <= flatten(read).items()


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """Test metrics of our own trial, by seed."""
    request = make_request((), "code", CHOSEN)
    return [evaluate_trial(request, seed, tmp_path_factory.mktemp("ours")) for seed in SEEDS]


@pytest.mark.slow
@pytest.mark.parametrize("library", SHORT)
def test_a_folder_reaches_the_metrics_of_our_trial(run_folder, ours, tmp_path, library):
    request = make_request((), "code", CHOSEN)
    exported, directory = export_training(request, library, "", tmp_path / "out")
    run_folder(library, exported, directory)
    trained = directory / "code-train" / f"checkpoint-{request.spec.training.steps}"
    theirs = evaluate_policy(request, trained, tmp_path / "evaluation")
    print(f"\nmetric        ours, by seed                {library}")
    for name, estimate in theirs.items():
        values = [trial[name].mean for trial in ours]
        listed = "  ".join(f"{value:7.3f}" for value in values)
        print(f"{name:12}  {listed}  {estimate.mean:7.3f} +- {estimate.se:.3f}")
        noise = 3 * (estimate.se**2 + ours[0][name].se ** 2) ** 0.5
        assert min(values) - noise <= estimate.mean <= max(values) + noise, name


def evaluate_trial(request, seed, directory):
    config = request.spec.build_trial_config(request.params, seed, directory)
    return train(config, resume=None, report=lambda *_: None).test


def evaluate_policy(request, policy, directory):
    """Return the test metrics of a policy that a library saved, prompted as the embedded one."""
    config = request.spec.build_trial_config(request.params, 0, directory)
    model = config.model.replace(instructions="off")
    config = replace(config, train=False, policy=str(policy), model=model)
    return train(config, resume=None, report=lambda *_: None).test
