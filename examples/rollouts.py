"""Reinforcement learning (GRPO) with a probe's score in the reward, on a CPU.

The engine samples groups of completions of each prompt, while a `Monitor` scores their states by a probe of the sea. The reward is
the mean score, and a term of the text. A copy of the model in transformers takes a policy-gradient step, and `lm.update_weights`
gives the engine the new tensors, in place. Only layers behind the probe's site are trained: the policy can earn the score by other
tokens, and not by other states of the same tokens.

Reference: Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models" (2024),
https://arxiv.org/abs/2402.03300

Usage: python examples/rollouts.py
"""

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from pymllm_interp import LM, RequestOutput, SamplingParams
from pymllm_interp.interventions import Monitor

SEA = ["The waves hit the ship", "We sailed over the ocean", "Fish swim under the boat", "The tide covered the beach"]
OTHERS = [
    "The judge read the law",
    "We drove over the hills",
    "Birds sing in the forest",
    "The teacher closed the book",
]
PROMPTS = ["This morning I went to", "My favourite picture shows"]
SITE, STEPS, GROUP, TOKENS, TOP_K, LR = "resid_post.15", 4, 5, 8, 20, 3e-3


def sea_probe(lm: LM) -> torch.Tensor:
    """Unit direction [hidden]: mean state of texts about the sea, less that of other texts."""
    outs = lm.generate(SEA + OTHERS, SamplingParams(max_tokens=0), capture=[SITE])
    means = torch.stack([out.activations[SITE][1:].float().mean(0) for out in outs])
    return torch.nn.functional.normalize(means[:4].mean(0) - means[4:].mean(0), dim=0)


def reward(out: RequestOutput) -> float:
    """Mean score of the generated states, and 2 for a text without a repeated word."""
    words = out.text.lower().split()
    return out.monitors["sea"].scores.mean().item() + 2.0 * (len(set(words)) == len(words))


def logprobs(policy: torch.nn.Module, outs: list[RequestOutput]) -> torch.Tensor:
    """[rollouts, tokens] log probabilities of tokens among the `TOP_K` that they were sampled from. All have one length."""
    ids = torch.tensor([out.prompt_token_ids + out.token_ids for out in outs])
    logits = policy(ids, logits_to_keep=TOKENS + 1).logits[:, :-1]
    return logits.gather(-1, ids[:, -TOKENS:, None])[..., 0] - logits.topk(TOP_K).values.logsumexp(-1)


def main() -> tuple[list[float], float, list[list[int]]]:
    with LM("demo", logprobs_mode="processed_logprobs") as lm:
        policy = AutoModelForCausalLM.from_pretrained(lm.tokenizer.name_or_path, dtype=lm.dtype).requires_grad_(False)
        trained = {name: p for name, p in policy.named_parameters() if "layers.29.mlp.down_proj" in name}
        optimizer = torch.optim.Adam([p.requires_grad_() for p in trained.values()], lr=LR)
        watch = Monitor(SITE, sea_probe(lm), name="sea", positions="generated")
        prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
        sampling = SamplingParams(top_k=TOP_K, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        # the same noise in each step: steps differ by their weights only
        params = [replace(sampling, seed=seed) for seed in range(len(prompts))]
        rewards, off = [], 0.0
        for step in range(STEPS):
            outs = lm.generate(prompts, params, monitors=[watch])
            found = torch.tensor([reward(out) for out in outs]).view(-1, GROUP)
            advantages = (found - found.mean(1, keepdim=True)) / (found.std(1, keepdim=True) + 1e-4)
            optimizer.zero_grad()
            for i, advantage in enumerate(advantages):  # of a prompt
                group = outs[i * GROUP : (i + 1) * GROUP]
                old = torch.tensor(
                    [[each[t].logprob for t, each in zip(o.token_ids, o.logprobs, strict=True)] for o in group]
                )
                ratio = (logprobs(policy, group) - old).exp()  # 1: the policy is the model that sampled
                off = max(off, (ratio - 1).abs().max().item())
                (-advantage[:, None] * ratio).mean().backward()
            optimizer.step()
            rewards.append(found.mean().item())
            print(f"weights {lm.weights.version}: reward {rewards[-1]:.2f}, e.g. {prompts[0]}{outs[0].text!r}")
            if step < STEPS - 1:
                lm.update_weights(trained)
        (again,) = lm.generate([prompts[1]], params[1])
        assert again.token_ids == outs[1].token_ids  # a seed replays a rollout, token by token
        pieces = lm.stream(prompts[0], replace(sampling, max_tokens=24, seed=0), monitors=[watch])
        next(pieces)
        lm.pause("keep")  # with a rollout in flight
        lm.update_weights(trained)
        lm.resume()
        *_, last = pieces
    print(f"versions and tokens of the rollout in flight: {last.receipt.weights}")
    return rewards, off, last.receipt.weights


if __name__ == "__main__":
    main()
