"""Plays a new user's first hour with whatever `lightrl` is on the path: `python new_user.py MODEL`, in an empty folder.

A project, the user's own rows and reward function, checks before the run, two rollouts, a report, the exported model,
which transformers and vLLM load. Their log-probs and greedy completions of the held-out rows are left in `loaded.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

REWARD = '''
def near(completions, total, **columns):
    """1 for the sum, less the farther a number is from it, and a little less for a longer text."""
    ends = ["".join(ch for ch in text if ch.isdigit())[-3:] for text in completions]
    return [1 / (1 + abs(int(end or 0) - t)) - len(text) / 1000 for end, text, t in zip(ends, completions, total)]
'''
CHANGES = {  # in config.yaml
    "rewards.py:correct": "rewards.py:near",
    "evaluation: {prompts: {path: rows.jsonl}}": "evaluation: {prompts: {path: held_out.jsonl}}",
    "max_new_tokens: 64": "max_new_tokens: 8",
    "rollouts_per_epoch: 5": "rollouts_per_epoch: 2",
    "every_n_rollouts: 5": "every_n_rollouts: 1",
    "max_epochs: 10": "max_epochs: 1",
    "lr: 1.0e-6": "lr: 1.0e-4",
}
SMALL = [
    *("--data.init_args.prompts_per_rollout=2", "--data.init_args.group_size=4", "--trainer.accelerator=cpu"),
    "--data.init_args.engine=TransformersEngine",  # vLLM starts once, with the exported model
]


def play(model: str) -> None:
    """Each command as it is typed; in one process, which loads torch once."""
    from lightrl.cli import main

    def lightrl(*arguments: str) -> None:
        sys.argv = ["lightrl", *arguments]
        print("$", *sys.argv, flush=True)
        main(list(arguments))

    lightrl("init", "mine", "--model", model)
    os.chdir("mine")
    for name, seed, size in (("rows", 1, 8), ("held_out", 101, 4)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums(seed, size)))
    Path("rewards.py").write_text(REWARD)
    config = Path("config.yaml").read_text()
    for old, new in CHANGES.items():
        assert old in config, old
        config = config.replace(old, new)
    Path("config.yaml").write_text(config)
    lightrl("doctor", "--config", "config.yaml")
    lightrl("fit", "--config", "config.yaml", *SMALL)
    lightrl("report", "outputs/grpo")
    lightrl("export", "--checkpoint", "outputs/grpo/checkpoints/last.ckpt", "--output", "exported")
    samples = [json.loads(line) for line in Path("outputs/grpo/samples.jsonl").read_text().splitlines()]
    Path("loaded.json").write_text(json.dumps(load(model, [sample["prompt"] for sample in samples[-4:]])))
    for folder in ("outputs/grpo/checkpoints", "outputs/grpo/model", "exported"):  # 2.7 GB
        shutil.rmtree(folder)


def sums(seed: int, size: int) -> list[dict[str, Any]]:
    """Rows from reasoning-gym, whose examples have the seeds `seed`, `seed + 1`, and so on."""
    import reasoning_gym

    settings = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    entries = reasoning_gym.create_dataset("chain_sum", size=size, seed=seed, **settings)
    return [{"prompt": entry["question"], "total": int(entry["answer"])} for entry in entries]


def load(model: str, prompts: list[str]) -> dict[str, Any]:
    """Greedy completions of transformers and vLLM, and log-probs of three models in plain transformers.

    They are the model from before, the same one with the weights of the checkpoint, and the exported one.
    """
    # Saves time and memory: one process, nothing compiled, and a small cache (vLLM asks for 92% of the memory).
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    small = {"max_model_len": 128, "enforce_eager": True, "kv_cache_memory_bytes": 2**28}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    folders = {"before": model, "trained": model, "exported": "exported"}
    models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in folders.items()}
    state = torch.load("outputs/grpo/checkpoints/last.ckpt", mmap=True, weights_only=True)["state_dict"]
    actor = {name.removeprefix("actor.lm."): tensor for name, tensor in state.items()}
    models["trained"].load_state_dict(actor, strict=False)
    tokenizer = AutoTokenizer.from_pretrained("exported")
    found: dict[str, Any] = {"logprobs": {name: [] for name in models}, "transformers": []}
    for text in prompts:
        prompt = tokenizer(text, return_tensors="pt").input_ids
        ids = models["exported"].generate(prompt, max_new_tokens=8, do_sample=False)
        found["transformers"].append(tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True))
        for name, each in models.items():
            with torch.no_grad():
                logprobs = each(ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])
            found["logprobs"][name] += logprobs[0, prompt.shape[1] - 1 :, 0].tolist()
    engine = LLM("exported", dtype="float32", **small)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    found["vllm"] = [done.outputs[0].text for done in engine.generate(prompts, greedy)]
    return found


if __name__ == "__main__":
    play(sys.argv[1])
