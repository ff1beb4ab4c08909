"""Computes recorded steps of reinforcement learning again, in numpy, and compares them with the record and with metrics.jsonl.

    python recompute_step.py RUN_DIR [--step N ...] [--tolerance 1e-4]

RUN_DIR is a run with `rl.record = "full"`, whose rl/steps/step-NNNNNN.safetensors hold tokens, log-probabilities, values, rewards,
advantages and returns of each response. From the log-probabilities, scores and values of a step and the settings in
config.resolved.toml this script computes

- scores after penalty, scaling and clipping; rewards with KL; the adapted KL coefficient of the next step;
- advantages and returns of PPO (GAE, whitening), GRPO, Dr. GRPO, RLOO, REINFORCE++ and RAFT, in the token and the sequence form;
- importance weights;
- policy, KL and value loss of the first mini-batch before any update, where every ratio is 1;
- every metric of metrics.jsonl that is a mean, a maximum or a minimum of these.

Each part starts from the recorded values of the previous part, so that a difference shows its cause. Numbers must agree to
`--tolerance` times the larger of 1 and the number itself: both sides compute in float32 and float64 in different orders. The losses
use log-probabilities that the update computed again, whose rounding error is `rollout_probs_diff` (1e-5 on a CPU; up to 5e-2 on a GPU:
set a larger tolerance there). Exit code 1 if anything differs. Needs only numpy (Python 3.11).
"""

import argparse
import json
import sys
import tomllib
from pathlib import Path

import numpy as np

DTYPES = {"F32": np.float32, "F64": np.float64, "U32": np.uint32, "U8": np.uint8}
# Log-ratios are clamped to the first, the k3 estimate to the second.
MAX_LOG_RATIO, MAX_K3 = 20.0, 10.0
EPSILON = 1e-6


def read_safetensors(path):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    read = lambda entry: np.frombuffer(body[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]])
    return {name: read(entry) for name, entry in header.items()}


class Step:
    """A record of a step; per-token tensors have one row per response."""

    def __init__(self, path):
        self.tensors = read_safetensors(path)
        self.number = int(path.stem.removeprefix("step-"))
        self.lengths = self.tensors["response_lengths"].astype(int)
        self.groups = self.tensors["rows"].astype(int)

    def rows(self, name):
        return np.split(self.tensors[name].astype(np.float64), np.cumsum(self.lengths)[:-1])

    def has(self, name):
        return name in self.tensors

    def scalar(self, name):
        return float(self.tensors[name][0])


class Checks:
    """Compares numbers and counts differences."""

    def __init__(self, tolerance):
        self.tolerance, self.n, self.failures, self.worst = tolerance, 0, [], 0.0

    def compare(self, what, computed, expected):
        computed, expected = np.asarray(computed, float), np.asarray(expected, float)
        self.n += 1
        if computed.shape != expected.shape:
            self.failures.append(f"{what}: {computed.shape} numbers computed, {expected.shape} recorded")
            return
        error = np.abs(computed - expected) / np.maximum(1.0, np.abs(expected))
        worst = float(np.max(error, initial=0.0))
        # A comparison with NaN is always false.
        if not worst <= self.tolerance:
            at = int(np.argmax(np.nan_to_num(error, nan=np.inf)))
            values = f"{computed.flat[at]:.9g}, recorded {expected.flat[at]:.9g}"
            self.failures.append(f"{what}: computed {values} (differs by {worst:.1e})")
        self.worst = max(self.worst, worst)


def kl_rows(estimator, logprobs, references):
    def of(p, q):
        if estimator == "k1":
            return p - q
        if estimator == "k2":
            return 0.5 * (p - q) ** 2
        ratio = np.clip(q - p, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        return np.clip(np.exp(ratio) - ratio - 1.0, -MAX_K3, MAX_K3)

    return [of(p, q) for p, q in zip(logprobs, references)]


def overlong_penalties(rl, step):
    buffer = rl.get("overlong_buffer_len", 0)
    if buffer == 0:
        return np.zeros(len(step.lengths))
    return np.maximum(step.lengths - (rl["max_new_tokens"] - buffer), 0) / buffer * rl["overlong_penalty_factor"]


def penalised(rl, step):
    scores = step.tensors["scores"].astype(np.float64) - rl["missing_eos_penalty"] * step.tensors["truncated"]
    return scores - overlong_penalties(rl, step)


def scaled(rl, scores, deviation):
    if rl["normalize_rewards"] and deviation > 1e-6:
        scores = scores / deviation
    return np.clip(scores, -rl["reward_clip"], rl["reward_clip"]) if rl["reward_clip"] > 0 else scores


def shaped_scores(rl, step, deviation):
    return scaled(rl, penalised(rl, step), deviation)


def anchor_of(rl, step):
    """The anchor reward, which each group's baseline counts as one more response: an array of length one or zero."""
    anchor = rl.get("anchor_baseline")
    return np.array([] if anchor is None else [scaled(rl, float(anchor), step.scalar("score_deviation"))], float)


def token_rewards(scores, kl, kl_coef):
    rewards = [-kl_coef * row for row in kl]
    for row, score in zip(rewards, scores):
        row[-1] += score
    return rewards


def whiten(rows):
    values = np.concatenate(rows)
    if len(values) < 2:
        return [np.zeros_like(row) for row in rows]
    scale = 1.0 / np.sqrt(values.var(ddof=1) + 1e-8)
    return [(row - values.mean()) * scale for row in rows]


def gae(rewards, values, gamma, gae_lambda):
    advantages = []
    for row, value in zip(rewards, values):
        advantage, next_value, result = 0.0, 0.0, np.zeros_like(row)
        for t in reversed(range(len(row))):
            advantage = row[t] + gamma * next_value - value[t] + gamma * gae_lambda * advantage
            next_value, result[t] = value[t], advantage
        advantages.append(result)
    return advantages, [advantage + value for advantage, value in zip(advantages, values)]


def discounted(rewards, gamma):
    result = []
    for row in rewards:
        running, returns = 0.0, np.zeros_like(row)
        for t in reversed(range(len(row))):
            running = row[t] + gamma * running
            returns[t] = running
        result.append(returns)
    return result


def totals_of(rewards):
    """The sum of each response's rewards in float32 and in order, because the deviation of a group may be as small as its rounding error."""
    return np.array([np.cumsum(row.astype(np.float32), dtype=np.float32)[-1] for row in rewards], np.float64)


def members(groups):
    return [np.flatnonzero(groups == group) for group in np.unique(groups)]


def is_flat(values):
    return values.std(ddof=1) < EPSILON * max(1.0, np.abs(values).max())


def group_baseline(algorithm, totals, groups, anchor):
    advantages = np.zeros_like(totals)
    for rows in members(groups):
        values, n = np.append(totals[rows], anchor), len(rows) + len(anchor)
        if n < 2:
            continue
        distance = totals[rows] - values.mean()
        if algorithm == "raft":
            best = rows[np.argmax(totals[rows])]
            advantages[best] = float(not is_flat(values) and all(totals[best] > anchor))
        elif algorithm == "grpo":
            advantages[rows] = 0.0 if is_flat(values) else distance / (values.std(ddof=1) + EPSILON)
        else:
            advantages[rows] = distance * (n / (n - 1) if algorithm == "rloo" else 1.0)
    return advantages


def estimate(rl, step, rewards):
    """Advantages and returns of a batch; returns are `None` without a critic."""
    algorithm, is_sequence = rl["algorithm"], rl["advantage_form"] == "sequence"
    whitened = whiten if rl["whiten_advantages"] else lambda rows: rows
    repeat = lambda column: [np.full(len(row), value) for row, value in zip(rewards, column)]
    column_whitened = lambda values: np.concatenate(whitened([np.array([value]) for value in values]))
    returns = None
    if algorithm == "ppo":
        values = step.rows("values")
        if is_sequence:
            totals = totals_of(rewards)
            advantages = repeat(column_whitened(totals - np.array([row[0] for row in values])))
            returns = repeat(totals)
        else:
            advantages, returns = gae(rewards, values, rl["gamma"], rl["gae_lambda"])
            advantages = whitened(advantages)
    elif algorithm == "reinforce_plus_plus":
        advantages = repeat(column_whitened(totals_of(rewards))) if is_sequence else whitened(discounted(rewards, rl["gamma"]))
    else:
        advantages = repeat(group_baseline(algorithm, totals_of(rewards), step.groups, anchor_of(rl, step)))
    if rl["advantage_clip"] > 0:
        advantages = [np.clip(row, -rl["advantage_clip"], rl["advantage_clip"]) for row in advantages]
    return advantages, returns


def importance(rl, logprobs, sampled):
    """Importance weights of tokens sampled from another distribution; `None` if all are 1."""
    if not rl["off_by_one"] and all(np.array_equal(p, q) for p, q in zip(logprobs, sampled)):
        return None
    weight = lambda ratio: np.minimum(np.exp(np.clip(ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)), rl["importance_cap"])
    if rl["advantage_form"] == "sequence":
        return [np.full(len(p), weight((p - q).sum())) for p, q in zip(logprobs, sampled)]
    return [weight(p - q) for p, q in zip(logprobs, sampled)]


def loss_weights(rl, lengths):
    """The weight of each token in the loss of an optimizer step."""
    n = len(lengths)
    of_algorithm = {"grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm"}
    of_loss = {"gspo": "seq-mean-token-mean", "cispo": "token-mean"}
    mode = rl.get("loss_agg", "algorithm")
    if mode == "algorithm":
        mode = of_loss.get(rl.get("policy_loss")) or of_algorithm.get(rl["algorithm"], "token-mean")
    if rl["advantage_form"] == "sequence" or mode == "seq-mean-token-sum":
        return [np.full(length, 1.0 / n) for length in lengths]
    if mode == "seq-mean-token-mean":
        return [np.full(length, 1.0 / (length * n)) for length in lengths]
    if mode == "seq-mean-token-sum-norm":
        return [np.full(length, 1.0 / (rl["max_new_tokens"] * n)) for length in lengths]
    return [np.full(length, 1.0 / sum(lengths)) for length in lengths]


def policy_loss(rl, advantages, logprobs, weights, importances):
    """The policy loss with all ratios 1, where neither the clip nor the dual clip, which is above 1, is active."""
    ones = importances or [np.ones_like(row) for row in advantages]
    if rl["advantage_form"] == "sequence":
        return sum(-row[0] * one[0] / len(advantages) for row, one in zip(advantages, ones))
    if rl["algorithm"] == "raft":  # cross-entropy, without importance weights
        return sum((-row * logprob * weight).sum() for row, logprob, weight in zip(advantages, logprobs, weights))
    if rl.get("policy_loss") == "cispo":
        advantages = [row * logprob for row, logprob in zip(advantages, logprobs)]
    return sum((-row * weight * one).sum() for row, weight, one in zip(advantages, weights, ones))


def value_loss(rl, values, returns):
    # In the sequence form the critic learns at the first token.
    keep = (lambda row: row[:1]) if rl["advantage_form"] == "sequence" else lambda row: row
    error = np.concatenate([keep(value) - keep(target) for value, target in zip(values, returns)])
    loss = 0.5 * error**2
    if rl["value_loss"] == "huber":
        loss = np.where(np.abs(error) > 1.0, np.abs(error) - 0.5, loss)
    return loss.mean()


def summary(name, values):
    values = np.concatenate(values) if isinstance(values, list) else np.asarray(values)
    return {f"{name}/mean": values.mean(), f"{name}/max": values.max(), f"{name}/min": values.min()}


def explained_variance(rl, values, returns):
    keep = (lambda row: row[:1]) if rl["advantage_form"] == "sequence" else lambda row: row
    values, returns = (np.concatenate([keep(row) for row in rows]) for rows in (values, returns))
    return 1.0 - (returns - values).var() / returns.var() if returns.var() > 0 else 0.0


def metrics_of(rl, step, shaped, rewards, advantages, importances):
    """Metrics of the batch from its recorded values."""
    logprobs, references = step.rows("logprobs"), step.rows("ref_logprobs")
    kl = {name: kl_rows(name, logprobs, references) for name in ("k1", "k3", rl["kl_estimator"])}
    mean = lambda rows: np.concatenate(rows).mean()
    totals = totals_of(rewards)
    metrics = summary("critic/rewards", totals) | summary("critic/advantages", advantages)
    metrics |= summary("critic/score", step.tensors["scores"]) | summary("response_length", step.lengths)
    metrics["response_length/clip_ratio"] = step.tensors["truncated"].mean()
    metrics["actor/ref_kl"], metrics["actor/ref_kl_k3"] = mean(kl["k1"]), mean(kl["k3"])
    metrics["objective/kl"] = np.concatenate(kl["k1"]).sum() / len(kl["k1"])
    if rl["kl_placement"] == "reward":
        metrics["actor/reward_kl_penalty"] = mean(kl[rl["kl_estimator"]])
        metrics["actor/reward_kl_penalty_coeff"] = step.scalar("kl_coef")
    else:
        metrics["actor/kl_coef"] = step.scalar("kl_coef")
    if rl["algorithm"] in ("grpo", "dr_grpo", "rloo", "raft"):
        compared = [np.append(shaped[rows], anchor_of(rl, step)) for rows in members(step.groups)]
        compared = [values for values in compared if len(values) >= 2]
        metrics["frac_reward_zero_std"] = sum(map(is_flat, compared)) / max(len(compared), 1)
    if rl["n_samples"] >= 2 and "loss_agg" in rl:  # runs of earlier versions have neither
        scores = step.tensors["scores"].astype(np.float64)
        deviations = [scores[rows].std(ddof=1) for rows in members(step.groups) if len(rows) >= 2]
        metrics["reward_std"] = sum(deviations) / max(len(deviations), 1)
    if rl.get("overlong_buffer_len", 0) > 0:
        penalties = overlong_penalties(rl, step)
        metrics["overlong_reward"], metrics["overlong"] = -penalties.mean(), (penalties > 0).mean()
    if step.has("values"):
        values, returns = step.rows("values"), step.rows("returns")
        metrics |= summary("critic/values", values) | summary("critic/returns", returns)
        metrics["critic/vf_explained_var"] = explained_variance(rl, values, returns)
    if importances is not None:
        flat = np.concatenate(importances)
        metrics["rollout_corr/rollout_is_mean"], metrics["rollout_corr/rollout_is_max"] = flat.mean(), flat.max()
        metrics["rollout_corr/rollout_is_eff_sample_size"] = flat.mean() ** 2 / (flat**2).mean()
    return metrics


def next_kl_coef(rl, step, kl):
    """The KL coefficient of the step after `step`, adapted to its KL."""
    coefficient = step.scalar("kl_coef")
    if rl["kl_target"] <= 0:
        return coefficient
    error = np.clip(np.mean([row.sum() for row in kl]) / rl["kl_target"] - 1.0, -0.2, 0.2)
    return coefficient * max(1.0 + error * len(kl) / rl["kl_horizon"], 0.1)


def check_losses(rl, step, checks, metrics, importances):
    rows = step.tensors["first_mini_batch"].astype(int)
    pick = lambda of_batch: [of_batch[row] for row in rows]
    weights = loss_weights(rl, step.lengths[rows])
    advantages, logprobs = pick(step.rows("advantages")), pick(step.rows("logprobs"))
    losses = {"actor/pg_loss": policy_loss(rl, advantages, logprobs, weights, importances and pick(importances))}
    if rl["kl_placement"] == "loss":
        kl = kl_rows(rl["kl_estimator"], logprobs, pick(step.rows("ref_logprobs")))
        losses["actor/kl_loss"] = sum((row * weight).sum() for row, weight in zip(kl, weights))
    if step.has("values"):
        losses["critic/vf_loss"] = value_loss(rl, pick(step.rows("values")), pick(step.rows("returns")))
    # The critic takes one step per mini-batch, whether or not the policy is updated.
    n_mini_batches = -(-len(step.lengths) // rl["mini_batch_size"]) * rl["ppo_epochs"]
    for name, loss in losses.items():
        if not step.has(f"first/{name}"):
            continue  # critic_warmup_steps: the policy was not updated
        checks.compare(f"{name} of the first mini-batch", loss, step.scalar(f"first/{name}"))
        # metrics.jsonl has means over all optimizer steps; only the first one precedes any update.
        n_updates = metrics.get("actor/n_updates") if name.startswith("actor/") else n_mini_batches
        if n_updates == 1:
            checks.compare(f"{name} in metrics.jsonl", loss, metrics[name])


def check(rl, step, metrics, expected, checks):
    """Compares one step. `expected`: its KL coefficient and score deviation as computed from earlier steps, if known."""
    for name, value in expected.items():
        checks.compare(f"{name} from the steps before", step.scalar(name), value)
    logprobs, sampled = step.rows("logprobs"), step.rows("rollout_logprobs")
    kl = kl_rows(rl["kl_estimator"], logprobs, step.rows("ref_logprobs"))
    scores = shaped_scores(rl, step, step.scalar("score_deviation"))
    in_reward = step.scalar("kl_coef") if rl["kl_placement"] == "reward" else 0.0
    rewards = step.rows("rewards")
    checks.compare("rewards", np.concatenate(token_rewards(scores, kl, in_reward)), np.concatenate(rewards))
    advantages, returns = estimate(rl, step, rewards)
    checks.compare("advantages", np.concatenate(advantages), np.concatenate(step.rows("advantages")))
    if returns is not None:
        checks.compare("returns", np.concatenate(returns), np.concatenate(step.rows("returns")))
    importances = importance(rl, logprobs, sampled)
    check_losses(rl, step, checks, metrics, importances)
    for name, value in metrics_of(rl, step, scores, rewards, step.rows("advantages"), importances).items():
        if name not in metrics:
            checks.failures.append(f"{name}: not in metrics.jsonl")
        elif metrics[name] is not None:
            checks.compare(f"{name} in metrics.jsonl", value, metrics[name])
    return kl


def read_metrics(path):
    """Metrics of the training steps of `rl`, by step; evaluations have separate lines."""
    metrics = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(line)
        if line["stage"] == "rl" and "critic/score/mean" in line:
            metrics[line["step"]] = line
    return metrics


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=int, action="append", help="only this step; may be repeated (default: all)")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    paths = sorted((args.run / "rl/steps").glob("step-*.safetensors"))
    if not paths:
        sys.exit(f'{args.run}/rl/steps: no records; train with `--set rl.record=full`')
    rl = tomllib.loads((args.run / "config.resolved.toml").read_text(encoding="utf-8"))["rl"]
    metrics = read_metrics(args.run / "metrics.jsonl")
    # Scores of all steps so far, if no step is missing; the coefficient computed from the previous step.
    all_scores, kl_coef, before = [], None, 0
    n_failed = n_checked = 0
    for step in map(Step, paths):
        is_next = step.number == before + 1
        expected = {}
        if all_scores is not None and is_next:
            all_scores.append(penalised(rl, step))
            n = sum(map(len, all_scores))
            if rl["normalize_rewards"] and n >= 2:
                expected["score_deviation"] = np.concatenate(all_scores).std(ddof=1)
        else:
            all_scores = None
        if kl_coef is not None and is_next:
            expected["kl_coef"] = kl_coef
        wanted = args.step is None or step.number in args.step
        checks = Checks(args.tolerance)
        if step.number not in metrics:
            sys.exit(f"{args.run}/metrics.jsonl: has no line for step {step.number} of rl")
        kl = check(rl, step, metrics[step.number], expected, checks)
        kl_coef, before = next_kl_coef(rl, step, kl), step.number
        if wanted:
            n_checked += 1
            verdict = "ok" if not checks.failures else f"{len(checks.failures)} of {checks.n} differ"
            print(f"step {step.number}: {len(step.lengths)} responses, {checks.n} comparisons, largest difference {checks.worst:.1e}: {verdict}")
            for failure in checks.failures:
                print(f"  {failure}")
            n_failed += bool(checks.failures)
    if n_checked == 0:
        sys.exit(f"{args.run}/rl/steps: has none of the steps {args.step}")
    sys.exit(1 if n_failed else 0)


if __name__ == "__main__":
    main()
