"""TRL's PPO, GRPO and Dr. GRPO values in golden/trl.json: TRL's methods on seeded float32 tensors."""

from collections import defaultdict
from types import MethodType, SimpleNamespace
from unittest.mock import MagicMock

from common import GOLDEN, generator, write_json
import torch
import trl_formulas
from trl_formulas import new, old

BATCH, TOKENS, VOCAB = 4, 6, 3
MASK = torch.tensor(
    [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0]], dtype=torch.float32
)


def ppo():
    rng = generator(51)
    trainer = SimpleNamespace(
        kl_ctl=SimpleNamespace(value=0.05),
        config=SimpleNamespace(
            kl_penalty="kl", whiten_rewards=False, gamma=0.99, lam=0.95, cliprange=0.2, cliprange_value=0.2,
            vf_coef=0.5, ratio_threshold=10.0,
        ),
    )  # fmt: skip
    trainer._kl_penalty = MethodType(old["_kl_penalty"], trainer)
    scores = torch.randn(BATCH, generator=rng)
    old_logprobs = -1.5 * torch.rand(BATCH, TOKENS, generator=rng) - 0.1
    ref_logprobs = old_logprobs + 0.4 * torch.randn(BATCH, TOKENS, generator=rng)
    values = torch.randn(BATCH, TOKENS, generator=rng)
    rewards, _, _ = old["compute_rewards"](trainer, scores, old_logprobs, ref_logprobs, MASK)
    # Values and rewards after the end are set to 0 first, because TRL leaves the KL of padding in the rewards.
    values, advantages, returns = old["compute_advantages"](trainer, values, rewards, MASK)

    logprobs = (old_logprobs + 0.3 * torch.randn(BATCH, TOKENS, generator=rng)).requires_grad_()
    vpreds = (values + 0.4 * torch.randn(BATCH, TOKENS, generator=rng)).requires_grad_()
    logits = torch.randn(BATCH, TOKENS, VOCAB, generator=rng)
    pg_loss, weighted_vf_loss, stats = old["loss"](
        trainer, old_logprobs, values, logits, vpreds, logprobs, MASK, advantages, returns
    )
    (pg_loss + weighted_vf_loss).backward()
    return {
        "kl_coef": 0.05, "gamma": 0.99, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.5,
        "response_mask": MASK.int(), "scores": scores, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs,
        "rewards": rewards * MASK, "values": values, "advantages": advantages, "returns": returns,
        "logprobs": logprobs, "vpreds": vpreds, "pg_loss": pg_loss, "weighted_vf_loss": weighted_vf_loss,
        "policykl": stats["policy/policykl"], "clipfrac": stats["policy/clipfrac"],
        "vf_clipfrac": stats["val/clipfrac"], "grad_logprobs": logprobs.grad, "grad_vpreds": vpreds.grad,
    }  # fmt: skip


def grpo():
    rng = generator(52)
    old_logps = -1.5 * torch.rand(BATCH, TOKENS, generator=rng) - 0.1
    logps = old_logps + 0.3 * torch.randn(BATCH, TOKENS, generator=rng)
    ref_logps = old_logps + 0.4 * torch.randn(BATCH, TOKENS, generator=rng)
    advantages = torch.randn(BATCH, generator=rng)
    cases = {}
    for loss_type in ["grpo", "dr_grpo"]:
        for beta in [0.0, 0.1]:
            leaf = logps.clone().requires_grad_()
            trainer = SimpleNamespace(
                loss_type=loss_type, beta=beta, epsilon_low=0.2, epsilon_high=0.2, top_entropy_quantile=1.0,
                importance_sampling_level="token", use_vllm=False, max_completion_length=16,
                current_gradient_accumulation_steps=1, args=SimpleNamespace(delta=None), model=MagicMock(),
                accelerator=SimpleNamespace(gather=lambda x: x), _metrics=defaultdict(lambda: defaultdict(list)),
                _get_per_token_logps_and_entropies=lambda *_, leaf=leaf, **__: (leaf, torch.zeros_like(leaf)),
            )  # fmt: skip
            inputs = {
                "prompt_ids": torch.zeros(BATCH, 1), "prompt_mask": torch.ones(BATCH, 1),
                "completion_ids": torch.zeros(BATCH, TOKENS), "completion_mask": MASK, "advantages": advantages,
                "old_per_token_logps": old_logps, "ref_per_token_logps": ref_logps,
            }  # fmt: skip
            loss = new["_compute_loss"](trainer, None, inputs)
            loss.backward()
            cases[f"{loss_type}_{beta}"] = {
                "loss_type": loss_type, "beta": beta, "loss": loss, "grad_logps": leaf.grad,
            }  # fmt: skip
    return {
        "completion_mask": MASK.int(), "old_logps": old_logps, "logps": logps, "ref_logps": ref_logps,
        "advantages": advantages, "epsilon": 0.2, "max_completion_length": 16, "cases": cases,
    }  # fmt: skip


def running_moments():
    rng = generator(53)
    running = old["RunningMoments"](accelerator=SimpleNamespace(use_distributed=False))
    batches, stds, means = [], [], []
    for n in [5, 3, 8]:
        batch = 0.4 * torch.randn(n, generator=rng) - 0.2
        running.update(batch)
        batches.append(batch)
        stds.append(running.std)
        means.append(running.mean)
    return {"batches": batches, "std": stds, "mean": means}


def adaptive_kl():
    controller = old["AdaptiveKLController"](0.05, 6.0, 1000)
    coefficients = []
    for current in [1.0, 5.9, 6.5, 40.0]:
        controller.update(current, 64)
        coefficients.append(float(controller.value))
    return {"init_kl_coef": 0.05, "target": 6.0, "horizon": 1000, "n_steps": 64,
            "current": [1.0, 5.9, 6.5, 40.0], "kl_coef": coefficients}  # fmt: skip


if __name__ == "__main__":
    golden = {
        "versions": {"trl_ppo": trl_formulas.OLD, "trl_grpo": trl_formulas.NEW},
        "ppo": ppo(), "grpo": grpo(), "running_moments": running_moments(), "adaptive_kl": adaptive_kl(),
    }  # fmt: skip
    write_json(GOLDEN / "trl.json", golden)
    losses = {name: round(case["loss"].item(), 6) for name, case in golden["grpo"]["cases"].items()}
    print("trl.json:", round(golden["ppo"]["pg_loss"].item(), 6), losses)
