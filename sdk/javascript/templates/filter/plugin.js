// Drops samples whose rewrite is too long.

import { nChars, plugin, Rejection } from "#querl-sdk";

/** @import { Filter, Sample, Settings } from "#querl-sdk" */

/** @implements {Filter} */
export class Length {
  /** @param {Settings} settings */
  constructor(settings) {
    this.maxChars = settings.integer("max_chars", 40, { minimum: 1, maximum: 1000 });
  }

  /** @param {Sample} sample */
  check(sample) {
    const length = nChars(sample.rewrittenQuery);
    if (length > this.maxChars) {
      throw new Rejection("too_long", `${length} characters; at most ${this.maxChars} allowed`);
    }
  }
}

export default plugin({ filter: Length });
