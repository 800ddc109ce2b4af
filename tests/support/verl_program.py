"""Stand-in for `python` in an exported `run.sh`: starts verl up to its first batch.

    verl_program.py FILE -m verl.trainer.main_ppo ARGUMENTS

FILE holds `completions`, the tokens of G completions for each of the first prompts, as JSON. It is
replaced by what verl makes of them: tokens of the prompts, rewards and advantages.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


def check_first_batch(config: Any, task_runner_class: Any) -> None:
    """Do what verl's trainer does with a first batch, but for sampling."""
    import torch
    from omegaconf import OmegaConf
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
    from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
    from verl.trainer.ppo.ray_trainer import compute_advantage
    from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    OmegaConf.resolve(config)
    completions = json.loads(FILE.read_text())["completions"]
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    files, tokenizer = config.data.train_files, model.tokenizer
    dataset: Any = create_rl_dataset(files, config.data, tokenizer, None, is_train=True)
    order = list(create_rl_sampler(config.data, dataset))[: len(completions)]
    rows = [dataset[number] for number in order]
    builder: Any = create_continuous_token_builder(
        tokenizer, hf_model_type=model.hf_config.model_type, chat_template_kwargs={}, processor=None
    )
    prompts = [builder.build_initial_tokens(list(row["raw_prompt"])) for row in rows]
    batch = build_batch(rows, prompts, completions, config)
    outputs = asyncio.run(RewardLoopWorker(config).compute_score_batch(batch))
    scores = [output["reward_score"] for output in outputs]
    batch.batch["token_level_rewards"] = RewardManagerBase.assemble_rm_scores(batch, scores)
    rewards = gather_rewards(outputs)
    batch.non_tensor_batch.update(rewards)
    algorithm = config.algorithm
    advantages = compute_advantage(
        batch,
        adv_estimator=algorithm.adv_estimator,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
    ).batch["advantages"]
    assert torch.equal(advantages != 0, (advantages != 0) & (batch.batch["response_mask"] > 0))
    result = {
        "prompts": prompts,
        "scores": scores,
        "rewards": {name: values.tolist() for name, values in rewards.items()},
        "advantages": advantages[:, 0].tolist(),
        "rows": len(dataset),
        "order": order,
        "config": OmegaConf.to_container(config, resolve=True),
    }
    FILE.write_text(json.dumps(result))


def build_batch(rows: Any, prompts: Any, completions: Any, config: Any) -> Any:
    """Return a batch with the columns that verl's agents give to the reward loop."""
    import numpy as np
    import torch
    from verl import DataProto

    numbers = [number for number, group in enumerate(completions) for _ in group]
    sampled = [tokens for group in completions for tokens in group]
    width, longest = max(map(len, prompts)), config.data.max_response_length
    responses = torch.zeros(len(sampled), longest, dtype=torch.long)
    mask = torch.zeros_like(responses)
    for row, tokens in enumerate(sampled):
        responses[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
    before = torch.ones(len(sampled), width, dtype=torch.long)
    tensors = {
        "prompts": before,
        "responses": responses,
        "response_mask": mask,
        "attention_mask": torch.cat([before, mask], 1),
    }
    columns = ("data_source", "reward_model", "extra_info")
    others = {
        name: np.array([rows[number][name] for number in numbers], dtype=object) for name in columns
    }
    others["uid"] = np.array([str(number) for number in numbers], dtype=object)
    return DataProto.from_dict(tensors, non_tensors=others)


def gather_rewards(outputs: Any) -> dict[str, Any]:
    import numpy as np

    separate = [output["reward_extra_info"] for output in outputs]
    return {name: np.array([each[name] for each in separate]) for name in separate[0]}


if __name__ == "__main__":
    FILE = Path(sys.argv[1])
    from verl.trainer import main_ppo

    main_ppo.run_ppo = check_first_batch
    assert sys.argv[2:4] == ["-m", "verl.trainer.main_ppo"], sys.argv
    sys.argv = ["main_ppo", *sys.argv[4:]]
    main_ppo.main()
