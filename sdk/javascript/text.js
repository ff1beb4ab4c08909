// What JavaScript's own ways do too slowly in a component: spreading or matching costs thousands of instructions a character there.

/** Characters (code points) of a text. */
export function nChars(text) {
  let n = 0;
  for (let index = 0; index < text.length; index += 1) {
    const unit = text.charCodeAt(index);
    // The second half of a pair is no character of its own.
    if (unit < 0xdc00 || unit > 0xdfff) n += 1;
  }
  return n;
}

/** The text without these characters at its two ends. */
export function stripped(text, characters) {
  let [start, end] = [0, text.length];
  while (start < end && characters.includes(text[start])) start += 1;
  while (end > start && characters.includes(text[end - 1])) end -= 1;
  return text.slice(start, end);
}
