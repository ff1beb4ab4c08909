// Reward for rewrites that are shorter than the teacher's and retrieve hits of the same quality. README.md has the formula.

import { plugin } from "#querl-sdk";
import { nChars } from "./text.js";

export class Brevity {
  static requires = ["baseline", "retrieval"];

  constructor(settings) {
    this.enoughChars = settings.integer("enough_chars", 6, { minimum: 1, maximum: 1000 });
    this.tolerance = settings.number("quality_tolerance", 0.02, { minimum: 0, maximum: 1 });
  }

  range() {
    return [-1, 1];
  }

  score(episode) {
    const { policy } = episode;
    const baseline = episode.baselineOrReject();
    const before = top1(baseline, "baseline");
    // A response without a rewrite has no retrieval; it gets the lowest score.
    if (policy.rewrite === undefined) return scored(-1, false);
    const keptQuality = top1(policy, "policy") >= before - this.tolerance;
    return scored(this.saving(nChars(policy.rewrite), nChars(baseline.rewrite ?? "")), keptQuality);
  }

  /** Characters saved by the policy as a share of the longer rewrite, -1 to 1. A rewrite without letters or digits gets -1. */
  saving(nPolicy, nBaseline) {
    if (nPolicy === 0) return -1;
    const [policy, baseline] = [nPolicy, nBaseline].map((n) => Math.max(n, this.enoughChars));
    return (baseline - policy) / Math.max(baseline, policy);
  }
}

/** The score: a positive saving counts only if the quality of retrieval was kept, a negative one always. */
function scored(saving, keptQuality) {
  const total = keptQuality ? saving : Math.min(saving, 0);
  return { total, components: { saving, kept_quality: keptQuality ? 1 : 0 } };
}

function top1(candidate, side) {
  return candidate.hits(side)[0]?.rerankerScore ?? 0;
}

export default plugin({ reward: Brevity });
