// Reward for short rewrites: total = max(0, 1 - nChars / maxChars). Replace `Brevity.score` by your own formula.

import { nChars, plugin } from "#querl-sdk";

/** @import { Episode, Input, Reward, Settings } from "#querl-sdk" */

/**
 * The reward with its settings. querl constructs an object for each call: store no state between episodes.
 * @implements {Reward}
 */
export class Brevity {
  // An episode has the query, its context and the policy's rewrite. Further inputs must be declared here: "response", "prompt", "columns",
  // "baseline" (the teacher's rewrite), "retrieval", "judgement" or "style".
  static requires = /** @type {Input[]} */ ([]);

  /**
   * Reads all settings, each with its default and bounds. querl refuses a key that is not read here.
   * @param {Settings} settings
   */
  constructor(settings) {
    this.maxChars = settings.number("max_chars", 40, { minimum: 1, maximum: 1000 });
  }

  /**
   * Lowest and highest total with these settings. A total outside this range stops the run.
   * @returns {[number, number]}
   */
  range() {
    return [0, 1];
  }

  /**
   * The score of one episode. Throw a `Rejection` if it cannot be computed: that drops the episode, a score of 0 trains on it.
   * @param {Episode} episode
   */
  score({ policy: { rewrite } }) {
    // A response without a rewrite gets the lowest score, so that the policy learns to write one.
    if (rewrite === undefined) return { total: 0 };
    // `[...rewrite].length` is equal to `nChars(rewrite)`, but much slower in a component.
    const brevity = Math.max(0, 1 - nChars(rewrite) / this.maxChars);
    // Components are named parts of the score for metrics and reports.
    return { total: brevity, components: { brevity } };
  }
}

export default plugin({ reward: Brevity });
