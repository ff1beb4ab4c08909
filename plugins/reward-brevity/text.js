// How long a rewrite is for a reader.

// ASCII, general, Chinese and full-width. Written out: the engine in a component knows no `\p{...}`.
const SPACE_AND_PUNCTUATION =
  /[\s!-/:-@[-`{-~\u00a1-\u00bf\u2010-\u205e\u3000-\u303f\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65]+/g;
// A character beyond the first 65,536 is two units of a JavaScript string.
const SECOND_HALF = /[\udc00-\udfff]/g;

/** Characters of the text; spaces and punctuation do not count. */
export function nChars(text) {
  return text.replace(SPACE_AND_PUNCTUATION, "").replace(SECOND_HALF, "").length;
}
