"""PPO, KL, entropy and optimizer values in golden/ppo.json: verl's functions on seeded float32 tensors.

Masked positions of the inputs contain large values, so that reading them is detected. Outputs at masked positions are arbitrary values of verl;
compare only where the mask is 1.
"""

from common import GOLDEN, generator, write_json
import numpy as np
import torch
import transformers
import verl_formulas
from verl_formulas import core_algos, dapo_overlong_reward, rollout_corr_helper, torch_functional
from transformers import get_cosine_schedule_with_warmup
from verl.trainer.config import AlgoConfig
from verl.workers.config import ActorConfig

BATCH, TOKENS, VOCAB = 4, 7, 5

RAGGED = torch.tensor(
    [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]], dtype=torch.float32
)
# Tokens in the middle of a response that the policy did not generate, such as the output of a tool.
INTERIOR = torch.tensor(
    [[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1, 0], [1, 0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1, 0]], dtype=torch.float32
)


def poison(values, mask, filler):
    return torch.where(mask.bool(), values, torch.full_like(values, filler))


def last_valid(mask):
    return mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)


def gae():
    rng = generator(31)
    cases = {}
    for name, mask in {"ragged": RAGGED, "interior": INTERIOR}.items():
        rewards = 0.05 * torch.randn(BATCH, TOKENS, generator=rng)
        rewards[torch.arange(BATCH), last_valid(mask)] += torch.randn(BATCH, generator=rng)
        rewards = poison(rewards, mask, 30.0)
        values = poison(torch.randn(BATCH, TOKENS, generator=rng), mask, -40.0)
        arguments = (rewards, values, mask, 0.99, 0.95)
        advantages, returns = core_algos.compute_gae_advantage_return(*arguments)
        whiten = torch_functional.masked_whiten
        torch_functional.masked_whiten = lambda unwhitened, _: unwhitened
        unwhitened, _ = core_algos.compute_gae_advantage_return(*arguments)
        torch_functional.masked_whiten = whiten
        cases[name] = {
            "gamma": 0.99, "lam": 0.95, "token_level_rewards": rewards, "values": values, "response_mask": mask.int(),
            "advantages": advantages, "advantages_unwhitened": unwhitened, "returns": returns,
        }  # fmt: skip
    return cases


def whitening():
    values = poison(2.0 + 3.0 * torch.randn(BATCH, TOKENS, generator=generator(32)), RAGGED, 500.0)
    return {
        "values": values,
        "response_mask": RAGGED.int(),
        "masked_mean": torch_functional.masked_mean(values, RAGGED),
        "masked_var": torch_functional.masked_var(values, RAGGED),
        "whitened": torch_functional.masked_whiten(values, RAGGED),
        "whitened_mean_kept": torch_functional.masked_whiten(values, RAGGED, shift_mean=False),
    }


def group_advantages():
    """Three queries; the responses of one are not adjacent, and one query has a single response."""
    rng = generator(40)
    index = np.array([4, 7, 4, 9, 7, 4])
    mask = torch.cat([RAGGED, RAGGED[:2]])
    rewards = 0.05 * torch.randn(len(index), TOKENS, generator=rng)
    rewards[torch.arange(len(index)), last_valid(mask)] += torch.randn(len(index), generator=rng)
    rewards = rewards * mask  # verl sums over complete rows here
    grpo = core_algos.compute_grpo_outcome_advantage
    config = AlgoConfig(gamma=0.99)
    plus_plus, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
    _, undiscounted = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, AlgoConfig(gamma=1.0))
    return {
        "index": index.tolist(), "response_mask": mask.int(), "token_level_rewards": rewards,
        "grpo": grpo(rewards.clone(), mask, index)[0],
        "dr_grpo": grpo(rewards.clone(), mask, index, norm_adv_by_std_in_grpo=False)[0],
        "rloo": core_algos.compute_rloo_outcome_advantage(rewards.clone(), mask, index)[0],
        "rloo_vectorized": core_algos.compute_rloo_vectorized_outcome_advantage(rewards.clone(), mask, index)[0],
        "reinforce_plus_plus": {"gamma": 0.99, "advantages": plus_plus, "returns": returns},
        "undiscounted_returns": undiscounted,
    }  # fmt: skip


def importance():
    rng = generator(41)
    rollout = -1.5 * torch.rand(BATCH, TOKENS, generator=rng) - 0.1
    old = rollout + 0.5 * torch.randn(BATCH, TOKENS, generator=rng)
    old[0, 0], old[1, 0] = rollout[0, 0] + 30.0, rollout[1, 0] - 30.0  # beyond the clamp of the log-ratio
    old, rollout = poison(old, RAGGED, 9.0), poison(rollout, RAGGED, -9.0)
    cases = {}
    for level in ["token", "sequence"]:
        weights, metrics = rollout_corr_helper.compute_rollout_correction_weights(
            old - rollout, RAGGED, rollout_is=level, rollout_is_threshold=2.0
        )
        cases[level] = {
            "weights": weights, "mean": metrics["rollout_is_mean"],
            "eff_sample_size": metrics["rollout_is_eff_sample_size"],
        }  # fmt: skip
    return {
        "old_log_prob": old, "rollout_log_prob": rollout, "response_mask": RAGGED.int(), "threshold": 2.0,
        "cases": cases,
    }  # fmt: skip


def policy_case(old_log_prob, log_prob, advantages, clip_low, clip_high, dual_clip, mode, is_weights=None, scale=None):
    log_prob = log_prob.clone().requires_grad_()
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
        clip_ratio=clip_low, clip_ratio_low=clip_low, clip_ratio_high=clip_high, clip_ratio_c=dual_clip,
    )  # fmt: skip
    if scale is not None:
        config.global_batch_info["loss_scale_factor"] = scale
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, RAGGED, loss_agg_mode=mode, config=config, rollout_is_weights=is_weights
    )
    loss.backward()
    return {
        "clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "clip_ratio_c": dual_clip, "loss_agg_mode": mode,
        "pg_loss": loss, "pg_clipfrac": metrics["actor/pg_clipfrac"],
        "pg_clipfrac_lower": metrics["actor/pg_clipfrac_lower"], "ppo_kl": metrics["actor/ppo_kl"],
        "grad_log_prob": log_prob.grad,
    }  # fmt: skip


def policy_loss():
    rng = generator(33)
    old = -1.5 * torch.rand(BATCH, TOKENS, generator=rng) - 0.1
    new = old + 0.3 * torch.randn(BATCH, TOKENS, generator=rng)
    advantages = torch.randn(BATCH, TOKENS, generator=rng)
    # Ratios above 3 with a negative advantage, where only the dual clip is active.
    for row, token in [(0, 1), (1, 3), (3, 4)]:
        new[row, token] = old[row, token] + 1.5
        advantages[row, token] = -0.5 - 0.3 * row
    old, new, advantages = poison(old, RAGGED, -9.0), poison(new, RAGGED, -2.0), poison(advantages, RAGGED, 70.0)

    off = 1e9  # a bound at which the dual clip is never active; verl cannot disable it
    far = new.clone()
    far[0, 0], far[1, 0] = old[0, 0] - 25.0, old[1, 0] + 25.0  # beyond the clamp of the log-ratio at 20
    far_advantages = advantages.clone()
    far_advantages[0, 0], far_advantages[1, 0] = 0.7, 0.9
    is_weights = 0.5 + torch.rand(BATCH, TOKENS, generator=rng)
    sum_norm = (0.2, 0.2, 3.0, "seq-mean-token-sum-norm", None, 16)
    return {
        "response_mask": RAGGED.int(), "importance_weights": is_weights,
        "old_log_prob": old, "log_prob": new, "advantages": advantages,
        "log_prob_far": far, "advantages_far": far_advantages,
        "cases": {
            "clip": policy_case(old, new, advantages, 0.2, 0.2, off, "token-mean"),
            "dual_clip": policy_case(old, new, advantages, 0.2, 0.2, 3.0, "token-mean"),
            "dual_clip_seq_mean": policy_case(old, new, advantages, 0.2, 0.2, 3.0, "seq-mean-token-mean"),
            "dual_clip_sum_norm": policy_case(old, new, advantages, *sum_norm),
            "weighted": policy_case(old, new, advantages, 0.2, 0.2, off, "token-mean", is_weights),
            "clip_higher": policy_case(old, new, advantages, 0.2, 0.28, off, "token-mean"),
            "unchanged": policy_case(old, old, advantages, 0.2, 0.2, off, "token-mean"),
            "far": policy_case(old, far, far_advantages, 0.2, 0.2, 3.0, "token-mean"),
        },
    }  # fmt: skip


def other_policy_loss_case(function, old_log_prob, log_prob, advantages, clip_low, clip_high, mode, is_weights=None):
    log_prob = log_prob.clone().requires_grad_()
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
        clip_ratio=clip_low, clip_ratio_low=clip_low, clip_ratio_high=clip_high,
    )  # fmt: skip
    loss, metrics = function(
        old_log_prob, log_prob, advantages, RAGGED, loss_agg_mode=mode, config=config, rollout_is_weights=is_weights
    )
    loss.backward()
    return {
        "clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "loss_agg_mode": mode, "pg_loss": loss,
        "grad_log_prob": log_prob.grad,
    } | {name.removeprefix("actor/"): value for name, value in metrics.items()}  # fmt: skip


def other_policy_losses():
    """GSPO, CISPO and the plain log-likelihood loss (`gpg`)."""
    rng = generator(42)
    old = -1.5 * torch.rand(BATCH, TOKENS, generator=rng) - 0.1
    new = old + 0.3 * torch.randn(BATCH, TOKENS, generator=rng)
    # Mean log-ratios of a response below and above a narrow clip range, with advantages of both signs.
    new = new + torch.tensor([0.25, -0.25, 0.3, -0.02]).unsqueeze(-1)
    advantages = torch.randn(BATCH, TOKENS, generator=rng)
    of_responses = torch.tensor([0.8, -0.6, -1.1, 0.4]).unsqueeze(-1).expand(BATCH, TOKENS).clone()
    is_weights = 0.5 + torch.rand(BATCH, TOKENS, generator=rng)
    far = new.clone()
    far[0], far[1] = old[0] - 25.0, old[1] + 12.0  # beyond the clamp of a log-ratio at -20, and of a mean log-ratio at 10
    inputs = {"old_log_prob": poison(old, RAGGED, -9.0), "log_prob": poison(new, RAGGED, -2.0)}
    inputs |= {"log_prob_far": poison(far, RAGGED, -2.0)}
    inputs |= {"advantages": poison(advantages, RAGGED, 70.0), "advantages_of_responses": of_responses}
    old, new, far = inputs["old_log_prob"], inputs["log_prob"], inputs["log_prob_far"]
    advantages = inputs["advantages"]
    gspo, cispo = core_algos.compute_policy_loss_gspo, core_algos.compute_policy_loss_cispo
    gpg = core_algos.compute_policy_loss_gpg
    case = other_policy_loss_case
    return inputs | {
        "response_mask": RAGGED.int(), "importance_weights": is_weights,
        "cases": {
            "gspo": case(gspo, old, new, of_responses, 0.1, 0.15, "seq-mean-token-mean"),
            "gspo_weighted": case(gspo, old, new, of_responses, 0.1, 0.15, "token-mean", is_weights),
            "gspo_token": case(gspo, old, new, advantages, 0.1, 0.15, "seq-mean-token-mean"),
            "gspo_far": case(gspo, old, far, of_responses, 0.1, 0.15, "seq-mean-token-mean"),
            "cispo": case(cispo, old, new, advantages, 0.2, 0.28, "token-mean"),
            "cispo_weighted": case(cispo, old, new, advantages, 0.2, 0.28, "seq-mean-token-mean", is_weights),
            "cispo_far": case(cispo, old, far, advantages, 0.2, 4.0, "token-mean"),
            "gpg": case(gpg, old, new, of_responses, 0.2, 0.2, "token-mean"),
        },
    }  # fmt: skip


def overlong():
    cases = []
    for max_resp_len, buffer_len, factor in [(20, 5, 1.0), (150, 30, 0.5), (8, 8, 2.0)]:
        lengths = sorted({1, max_resp_len - buffer_len, max_resp_len - buffer_len + 1, max_resp_len - 1, max_resp_len})
        lengths = [length for length in lengths if length > 0]
        rewards = [dapo_overlong_reward(length, max_resp_len, buffer_len, factor) for length in lengths]
        cases.append(
            {"max_resp_len": max_resp_len, "len": buffer_len, "penalty_factor": factor, "lengths": lengths,
             "overlong_reward": rewards}
        )  # fmt: skip
    return cases


def value_loss():
    rng = generator(34)
    values = poison(torch.randn(BATCH, TOKENS, generator=rng), RAGGED, 60.0)
    vpreds = poison(values + 0.4 * torch.randn(BATCH, TOKENS, generator=rng), RAGGED, -20.0)
    returns = poison(values + 0.5 * torch.randn(BATCH, TOKENS, generator=rng), RAGGED, 90.0)
    cases = {}
    for mode in ["token-mean", "seq-mean-token-mean"]:
        leaf = vpreds.clone().requires_grad_()
        loss, clipfrac = core_algos.compute_value_loss(leaf, returns, values, RAGGED, 0.2, loss_agg_mode=mode)
        loss.backward()
        cases[mode] = {"vf_loss": loss, "vf_clipfrac": clipfrac, "grad_vpreds": leaf.grad}
    cases["huber"], cases["unclipped_huber"] = huber(vpreds, returns, values, 0.2), huber(vpreds, returns, values, 1e9)
    return {
        "cliprange_value": 0.2, "response_mask": RAGGED.int(), "values": values, "vpreds": vpreds, "returns": returns,
        "cases": cases,
    }  # fmt: skip


def huber(vpreds, returns, values, cliprange):
    """verl has no Huber loss: uses torch's instead of the squared error."""
    leaf = (3.0 * vpreds).requires_grad_()  # some errors below and some above 1
    clipped = torch.clamp(leaf, values - cliprange, values + cliprange)
    plain, bounded = (torch.nn.functional.huber_loss(v, returns, reduction="none") for v in (leaf, clipped))
    loss = torch_functional.masked_mean(torch.max(plain, bounded), RAGGED)
    loss.backward()
    clipfrac = torch_functional.masked_mean((bounded > plain).float(), RAGGED)
    return {"vpreds": leaf, "vf_loss": loss, "vf_clipfrac": clipfrac, "grad_vpreds": leaf.grad}


def kl():
    rng = generator(35)
    log_prob = -2.0 * torch.rand(BATCH, TOKENS, generator=rng)
    ref = log_prob + 0.4 * torch.randn(BATCH, TOKENS, generator=rng)
    ref[0, 2] = log_prob[0, 2] + 25.0  # k3: log-ratio clamped at 20, estimate at 10
    ref[1, 1] = log_prob[1, 1]
    estimates = {}
    for ours, theirs in {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.items():
        leaf = log_prob.clone().requires_grad_()
        estimate = core_algos.kl_penalty(leaf, ref, theirs)
        estimate.sum().backward()
        estimates[ours] = {"verl_name": theirs, "kl": estimate, "grad_log_prob": leaf.grad}
        leaf = log_prob.clone().requires_grad_()
        loss = core_algos.agg_loss(core_algos.kl_penalty(leaf, ref, theirs), RAGGED, "seq-mean-token-mean")
        loss.backward()
        estimates[ours] |= {"loss_seq_mean_token_mean": loss, "grad_of_loss": leaf.grad}

    scores = torch.zeros(BATCH, TOKENS)
    scores[torch.arange(BATCH), last_valid(RAGGED)] = torch.tensor([0.8, -0.3, 0.5, 0.05])
    controller = core_algos.AdaptiveKLController(init_kl_coef=0.2, target_kl=6.0, horizon=10000)
    coefficients = []
    for current in [3.0, 6.0, 6.9, 20.0]:
        controller.update(current, 256)
        coefficients.append(float(controller.value))
    return {
        "log_prob": log_prob, "ref_log_prob": ref, "estimates": estimates,
        "rewards": {
            "kl_coef": 0.05, "token_level_scores": scores,
            "token_level_rewards": core_algos.compute_rewards(scores, log_prob, ref, 0.05),
        },
        "adaptive": {
            "init_kl_coef": 0.2, "target_kl": 6.0, "horizon": 10000, "n_steps": 256,
            "current_kl": [3.0, 6.0, 6.9, 20.0], "kl_coef": coefficients,
        },
    }  # fmt: skip


def entropy():
    rng = generator(36)
    logits = (2.0 * torch.randn(BATCH, TOKENS, VOCAB, generator=rng)).requires_grad_()
    labels = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=rng)
    token_entropy = torch_functional.entropy_from_logits(logits)
    token_mean = core_algos.compute_entropy_loss(logits, RAGGED)
    (gradient,) = torch.autograd.grad(token_mean, logits)
    return {
        "response_mask": RAGGED.int(), "logits": logits, "labels": labels,
        "entropy": token_entropy, "entropy_token_mean": token_mean, "grad_logits_of_token_mean": gradient,
        "logprobs": torch_functional.logprobs_from_logits(logits, labels),
    }  # fmt: skip


def aggregation():
    losses = poison(torch.randn(BATCH, TOKENS, generator=generator(37)), RAGGED, 80.0)
    empty_row = RAGGED.clone()
    empty_row[2] = 0
    modes = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
    return {
        "loss_mat": losses,
        "cases": [
            {"loss_mask": mask.int(), "seq-mean-token-sum-norm-16": core_algos.agg_loss(
                losses, mask, "seq-mean-token-sum-norm", loss_scale_factor=16
            )} | {mode: core_algos.agg_loss(losses, mask, mode) for mode in modes}
            for mask in [RAGGED, empty_row]
        ],
    }


def adamw():
    rng = generator(38)
    parameter = torch.nn.Parameter(torch.randn(2, 3, generator=rng))
    start = parameter.detach().clone()
    optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    gradients, parameters = [], []
    for step in range(5):
        parameter.grad = torch.randn(2, 3, generator=rng) * 10.0 ** (step - 2)
        gradients.append(parameter.grad.clone().tolist())
        optimizer.step()
        parameters.append(parameter.detach().clone().tolist())
    state = optimizer.state[parameter]
    return {
        "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "start": start,
        "gradients": gradients, "parameters": parameters, "exp_avg": state["exp_avg"],
        "exp_avg_sq": state["exp_avg_sq"],
    }  # fmt: skip


def clip_grad_norm():
    rng = generator(39)
    shapes = [(2, 3), (4,)]
    before = [torch.randn(shape, generator=rng) for shape in shapes]
    cases = []
    for max_norm in [1.0, 100.0]:
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient.clone()
        total_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        clipped = [parameter.grad for parameter in parameters]
        cases.append({"max_norm": max_norm, "total_norm": total_norm, "clipped": clipped})
    return {"gradients": before, "cases": cases}


def cosine_schedule():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=40)
    factors = []
    for _ in range(41):
        factors.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return {"num_warmup_steps": 2, "num_training_steps": 40, "factor_of_step_from_0_to_40": factors}


if __name__ == "__main__":
    golden = {
        "versions": {
            "verl": verl_formulas.VERSION, "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
        },
        "gae": gae(), "group_advantages": group_advantages(), "importance": importance(), "whitening": whitening(),
        "policy_loss": policy_loss(), "other_policy_losses": other_policy_losses(), "overlong": overlong(),
        "value_loss": value_loss(), "kl": kl(),
        "entropy": entropy(), "agg_loss": aggregation(), "adamw": adamw(), "clip_grad_norm": clip_grad_norm(),
        "cosine_schedule": cosine_schedule(),
    }  # fmt: skip
    write_json(GOLDEN / "ppo.json", golden)
    clip = golden["policy_loss"]["cases"]
    print("ppo.json:", {name: round(case["pg_loss"].item(), 6) for name, case in clip.items()})
