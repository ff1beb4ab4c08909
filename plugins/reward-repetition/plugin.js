// Penalty for repeated n-grams in a rewrite. README.md has the formula.

import { plugin, text } from "#querl-sdk";

/** A rewrite is cut to this number of UTF-16 code units, above the length of a usual rewrite, because each character costs fuel. */
const MAX_LENGTH = 200;

export class Repetition {
  static requires = [];

  constructor(settings) {
    this.ngram = settings.integer("ngram", 3, { minimum: 1, maximum: 8 });
    this.tolerated = settings.number("tolerated", 0, { minimum: 0, maximum: 0.9 });
    this.maxPenalty = settings.number("max_penalty", 1, { minimum: 0.01, maximum: 10 });
  }

  range() {
    return [-this.maxPenalty, 0];
  }

  score({ policy: { rewrite = "" } }) {
    const read = rewrite.length > MAX_LENGTH ? rewrite.slice(0, MAX_LENGTH) : rewrite;
    // True for a rewrite without units. The first character is checked first, because most texts begin with a unit.
    if (text.units(read.charAt(0)).length === 0 && text.units(read).length === 0) return { total: -this.maxPenalty };
    const repeated = text.repetition(read, this.ngram);
    const excess = Math.max(0, repeated - this.tolerated) / (1 - this.tolerated);
    // `0 -` instead of a unary minus, which would give -0 for no penalty.
    return { total: 0 - this.maxPenalty * excess, components: { repeated } };
  }
}

export default plugin({ reward: Repetition });
