// Rewards a rewrite for being short.

import { nChars, plugin } from "#querl-sdk";

/** @import { Episode, Input, Reward, Settings } from "#querl-sdk" */

/** @implements {Reward} */
export class Brevity {
  // Add "retrieval", "judgement", "baseline", "columns", "response", "prompt" or "style" to read them.
  static requires = /** @type {Input[]} */ ([]);

  /** @param {Settings} settings */
  constructor(settings) {
    this.maxChars = settings.number("max_chars", 40, { minimum: 1, maximum: 1000 });
  }

  /** @returns {[number, number]} */
  range() {
    return [0, 1];
  }

  /** @param {Episode} episode */
  score({ policy: { rewrite } }) {
    if (rewrite === undefined) return { total: 0 };
    const brevity = Math.max(0, 1 - nChars(rewrite) / this.maxChars);
    return { total: brevity, components: { brevity } };
  }
}

export default plugin({ reward: Brevity });
