"""Computes the win rate of the PPO policy over its SFT policy on held-out prompts, by the true preference.

python -m examples.rlhf.win_rate SFT_DIR PPO_DIR [REWARD_DIR]

Each policy samples answers to every held-out prompt at temperature 1, with transformers only. The answer with the
higher `utility` wins; a tie counts half. With a reward model, its scores of the same answers are shown next to the true
utility. If the learned reward is higher but the utility is not, the policy exploits the reward model.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.rlhf.task import prompts, utility
from lightrl.models.reward import RewardModel, RewardModelSpec
from lightrl.records import RowBatch

BEST = 7  # maximum of `utility`
NEEDED = 0.8


@torch.no_grad()
def answer(folder: str, questions: list[str], samples: int, seed: int) -> tuple[list[str], torch.Tensor]:
    """Samples answers. Returns their texts, and the token IDs of prompts with answers (equally long, so not padded)."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = tokenizer(questions, return_tensors="pt")["input_ids"].repeat_interleave(samples, 0)
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    texts = tokenizer.batch_decode(whole[:, ids.shape[1] :], skip_special_tokens=True)
    return texts, whole


@torch.no_grad()
def sampled_kl(policy: str, reference: str, token_ids: torch.Tensor, start: int, eos: int) -> float:
    """Returns the mean over answers of log policy - log reference, summed over the answer's tokens, end included."""
    logprobs = []
    for folder in (policy, reference):
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        scores = model(token_ids).logits[:, start - 1 : -1].log_softmax(-1)
        logprobs.append(scores.gather(2, token_ids[:, start:, None]).squeeze(2))
    ends = token_ids[:, start:] == eos
    mask = ends.cumsum(1) - ends.long() == 0
    return float(((logprobs[0] - logprobs[1]) * mask).sum(1).mean())


@torch.no_grad()
def compare(sft: str, ppo: str, reward: str | None = None, samples: int = 2) -> float:
    """Prints the comparison and returns the win rate. A tie counts half."""
    questions = prompts("eval")
    asked = [question for question in questions for _ in range(samples)]
    answers, ids = {}, {}
    for seed, (name, folder) in enumerate({"SFT": sft, "PPO": ppo}.items()):
        answers[name], ids[name] = answer(folder, questions, samples, seed)
    utilities = {name: [utility(q, a) for q, a in zip(asked, texts, strict=True)] for name, texts in answers.items()}
    model = RewardModel.from_spec(RewardModelSpec("preference", reward, tokenizer="policy")) if reward else None
    eos = AutoTokenizer.from_pretrained(sft).eos_token_id
    for name, values in utilities.items():
        best = sum(value == BEST for value in values) / len(values)
        line = f"{name}: true utility {sum(values) / len(values):.2f} of {BEST}, best answer {best:.1%}"
        if model is not None:
            ends = ids[name] == eos
            mask = ends.cumsum(1) - ends.long() == 0
            rows = RowBatch(token_ids=ids[name], attention_mask=mask, response_mask=mask)
            line += f", learned reward {model(rows).mean().item():.2f}"
        print(line, "| " + "  ".join(q + a for q, a in list(zip(asked, answers[name], strict=True))[:8:2]))
    print(f"KL(PPO || SFT): {sampled_kl(ppo, sft, ids['PPO'], len(questions[0]), eos):.2f} nats per answer")
    gaps = [p - s for p, s in zip(utilities["PPO"], utilities["SFT"], strict=True)]
    wins, ties = sum(gap > 0 for gap in gaps), sum(gap == 0 for gap in gaps)
    rate = (wins + ties / 2) / len(gaps)
    print(
        f"PPO against SFT on {len(questions)} held-out prompts, {samples} answers each: {wins} wins, {ties} ties, "
        f"{len(gaps) - wins - ties} losses: win rate {rate:.1%} (ties count half; at least {NEEDED:.0%} is expected)"
    )
    return rate


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sft", help="Directory of the SFT policy.")
    parser.add_argument("ppo", help="Directory of the PPO policy.")
    parser.add_argument("reward", nargs="?", help="Directory of the reward model.")
    parser.add_argument("--samples", type=int, default=2, help="Answers per prompt and policy.")
    arguments = parser.parse_args()
    if compare(arguments.sft, arguments.ppo, arguments.reward, arguments.samples) < NEEDED:
        raise SystemExit(f"The win rate is below {NEEDED:.0%}.")
