"""Stand-in for `uv` in an exported `run.sh`: starts NeMo-RL up to its first batch.

    nemo_program.py FILE run --project CHECKOUT python PROGRAM ARGUMENTS

FILE holds `completions`, the tokens of G completions for each of the first prompts, as JSON. It is
replaced by what NeMo-RL makes of them: tokens of the prompts, rewards and advantages.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import typing
from pathlib import Path
from typing import Any

import typing_extensions


def prepare(file: Path) -> None:
    """Replace what needs a GPU, and keep what reads the folder."""
    import ray
    from nemo_rl.algorithms import grpo
    from nemo_rl.data import utils
    from nemo_rl.distributed import virtual_cluster

    environments: dict[str, Any] = {}
    original = utils.setup_response_data

    def set_up_data(*arguments: Any) -> Any:
        result = original(*arguments)
        environments.update(result[2])
        return result

    def set_up(config: Any, tokenizer: Any, dataset: Any, *_: Any, **__: Any) -> None:
        file.write_text(
            json.dumps(check_first_batch(file, config, tokenizer, dataset, environments))
        )
        raise SystemExit(0)

    def start_ray() -> None:
        # Ray's own, without a dashboard.
        ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": dict(os.environ)})

    utils.setup_response_data = set_up_data
    grpo.setup = set_up
    virtual_cluster.init_ray = start_ray


def check_first_batch(
    file: Path, config: Any, tokenizer: Any, dataset: Any, environments: dict[str, Any]
) -> dict[str, Any]:
    """Do what NeMo-RL's trainer does with a first batch, but for sampling."""
    import torch
    from nemo_rl.algorithms.grpo import _create_advantage_estimator
    from nemo_rl.data.collate_fn import rl_collate_fn
    from nemo_rl.experience.rollouts import calculate_rewards

    completions = json.loads(file.read_text())["completions"]
    rows = [dataset[number] for number in range(len(completions))]
    prompts = [row["message_log"][0]["token_ids"].tolist() for row in rows]
    group = len(completions[0])
    batch = rl_collate_fn(rows).repeat_interleave(group)
    sampled = [torch.tensor(tokens) for group in completions for tokens in group]
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    for log, text, tokens in zip(batch["message_log"], texts, sampled, strict=True):
        log.append({"role": "assistant", "content": text, "token_ids": tokens})
    output = calculate_rewards(batch, environments)
    single = not isinstance(output.rewards, dict)
    rewards = {"sum": output.rewards} if single else output.rewards
    batch.update(rewards)
    numbers = torch.arange(len(completions)).repeat_interleave(group)
    advantages = _create_advantage_estimator(config).compute_advantage(
        prompt_ids=numbers[:, None],
        rewards=sum(rewards.values()),
        mask=torch.ones(len(texts), 3),
        repeated_batch=batch,
    )
    return {
        "prompts": prompts,
        "rewards": {name: values.tolist() for name, values in rewards.items()},
        "advantages": advantages[:, 0].tolist(),
        "observations": [each["content"] for each in output.observations],
        "ended": output.terminateds.tolist(),
        "stops": config.policy["generation"]["stop_token_ids"],
        "rows": len(dataset),
        "config": config.model_dump(mode="json"),
    }


if __name__ == "__main__":
    # For pydantic, where Python is older than the one that NeMo-RL requires.
    typing.TypedDict = typing_extensions.TypedDict
    prepare(Path(sys.argv[1]))
    assert sys.argv[2:4] == ["run", "--project"], sys.argv
    assert sys.argv[5] == "python", sys.argv
    sys.argv = sys.argv[6:]
    sys.path.insert(0, os.getcwd())
    runpy.run_path(sys.argv[0], run_name="__main__")
