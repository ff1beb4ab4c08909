// Filter of the training data: drops samples whose rewrite has more than `max_chars` characters.

import { nChars, plugin, Rejection } from "#querl-sdk";

/** @import { Filter, Sample, Settings } from "#querl-sdk" */

/**
 * The filter with its settings. querl constructs one object per batch of samples.
 * @implements {Filter}
 */
export class Length {
  /**
   * Reads all settings, each with its default and bounds. querl refuses a key that is not read here.
   * @param {Settings} settings
   */
  constructor(settings) {
    this.maxChars = settings.integer("max_chars", 40, { minimum: 1, maximum: 1000 });
  }

  /**
   * Returns nothing to keep the sample, throws a `Rejection` to drop it. May depend on earlier samples of the batch, for example to find
   * duplicates.
   * @param {Sample} sample
   */
  check(sample) {
    const length = nChars(sample.rewrittenQuery);
    if (length > this.maxChars) {
      // The code is counted in the report of the run; the sentence is for people.
      throw new Rejection("too_long", `${length} characters; at most ${this.maxChars} allowed`);
    }
  }
}

export default plugin({ filter: Length });
