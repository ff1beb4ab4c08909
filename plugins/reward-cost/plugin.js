// Reward for the gain of the best hit over the teacher's, minus a price for generated tokens. README.md has the formula.

import { plugin, Rejection } from "#querl-sdk";

export class Cost {
  static requires = ["baseline", "retrieval"];

  constructor(settings) {
    this.price = settings.number("price", 0.2, { minimum: 0, maximum: 1 });
    this.nTokens = settings.integer("n_tokens", 32, { minimum: 1, maximum: 100_000 });
  }

  range() {
    return [-1 - this.price, 1];
  }

  score(episode) {
    const { policy } = episode;
    if (policy.nTokens === undefined) throw new Rejection("policy_tokens_missing", "the host does not know how many tokens were generated");
    const before = top1(episode.baselineOrReject(), "baseline");
    // A response without a rewrite has no retrieval: it finds nothing.
    const gain = (policy.rewrite === undefined ? 0 : top1(policy, "policy")) - before;
    const cost = this.price * Math.min(1, policy.nTokens / this.nTokens);
    return { total: gain - cost, components: { gain, cost } };
  }
}

function top1(candidate, side) {
  return candidate.hits(side)[0]?.rerankerScore ?? 0;
}

export default plugin({ reward: Cost });
