// Length of a rewrite in characters, without spaces and punctuation.

/** Ranges of UTF-16 code units that do not count: spaces, punctuation (ASCII, general, CJK, full-width), and low surrogates. */
const NOT_COUNTED = [
  [0x00, 0x2f],
  [0x3a, 0x40],
  [0x5b, 0x60],
  [0x7b, 0xbf],
  [0x2000, 0x206f],
  [0x3000, 0x303f],
  [0xdc00, 0xdfff],
  [0xfe00, 0xfe0f],
  [0xff00, 0xff0f],
  [0xff1a, 0xff20],
  [0xff3b, 0xff40],
  [0xff5b, 0xff65],
];

// 1 for code units that count. A table, because a regular expression takes thousands of instructions per character in a component.
const COUNTED = new Uint8Array(0x10000).fill(1);
for (const [first, last] of NOT_COUNTED) COUNTED.fill(0, first, last + 1);

/** Number of code points of a text, without spaces and punctuation. */
export function nChars(text) {
  let n = 0;
  for (let index = 0; index < text.length; index += 1) n += COUNTED[text.charCodeAt(index)];
  return n;
}
