// Rewards a rewrite for being short.

import { nChars, plugin } from "#querl-sdk";

/** @import { Episode, Reward, Settings } from "#querl-sdk" */

/** @implements {Reward} */
export class Brevity {
  /** @param {Settings} settings */
  constructor(settings) {
    this.maxChars = settings.number("max_chars", 40, { minimum: 1, maximum: 1000 });
  }

  /** @returns {[number, number]} */
  range() {
    return [0, 1];
  }

  /** @param {Episode} episode */
  score(episode) {
    const brevity = Math.max(0, 1 - nChars(episode.policy.rewrite) / this.maxChars);
    return { total: brevity, components: { brevity } };
  }
}

export default plugin({ reward: Brevity });
