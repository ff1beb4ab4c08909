// Text functions for plugins. All are pure. The SDKs for Rust and Python have the same functions from `normalise` on, with bit-identical
// results, tested with sdk/testdata/text.jsonl. Documentation is in index.d.ts.
//
// In a component, function calls, spreading and regular expressions take thousands of instructions per character, so the common paths
// avoid them.

/** Number of code points of a text. */
export function nChars(text) {
  let n = 0;
  for (let index = 0; index < text.length; index += 1) {
    const unit = text.charCodeAt(index);
    // Skip low surrogates: a surrogate pair is one code point.
    if (unit < 0xdc00 || unit > 0xdfff) n += 1;
  }
  return n;
}

/** Strips these characters from both ends of a text. */
export function stripped(text, characters) {
  let [start, end] = [0, text.length];
  while (start < end && characters.includes(text[start])) start += 1;
  while (end > start && characters.includes(text[end - 1])) end -= 1;
  return text.slice(start, end);
}

// Unicode `White_Space`. `\s` lacks U+0085 and has U+FEFF in addition.
const BLANKS = /[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/g;
// A run of ASCII letters and digits, or one character that is neither whitespace nor punctuation (ASCII, Latin-1, general, CJK, vertical).
const UNIT =
  /[0-9a-z]+|[^\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e \xa1\xa7\xab\xb6\xb7\xbb\xbf\u2000-\u206f\u3000-\u3003\u3008-\u3011\u3014-\u301f\u3030\ufe30-\ufe4f\uff5f-\uff65]/gu;
const UNIT_ALONE = new RegExp(UNIT.source, "u");
const DIGITS = byCharacter(["0〇零", "1一壹", "2二两贰", "3三叁", "4四肆", "5五伍", "6六陆", "7七柒", "8八捌", "9九玖"], (n) => n);
const UNITS = byCharacter(["十拾", "百佰", "千仟", "万", "亿"], (n) => [10, 100, 1000, 1e4, 1e8][n]);
/** All integers below this are exact in f64. */
const END = 2 ** 53;

function byCharacter(texts, value) {
  return new Map(texts.flatMap((text, n) => [...text].map((character) => [character, value(n)])));
}

const halfWidth = (text) => text.replace(/[\uff01-\uff5e]/g, (c) => String.fromCharCode(c.charCodeAt(0) - 0xfee0));

export function normalise(text) {
  const plain = halfWidth(text).replace(/[\u200b\ufeff]/g, "");
  // `toLowerCase` on a string converts a final Σ to ς. The other SDKs convert code points one by one, so do the same here.
  const lowered = plain.includes("Σ") ? Array.from(plain, (c) => c.toLowerCase()).join("") : plain.toLowerCase();
  return stripped(lowered.replace(BLANKS, " "), " ");
}

// Class of a UTF-16 code unit in `units`: part of a run of letters and digits; a unit; a separator; or changed by normalisation (slow path).
const [RUN, SINGLE, SEPARATOR, OTHER] = [0, 1, 2, 3];
// Marked as pure, so that the bundler drops the table from plugins that do not use `units`.
const KINDS = /* @__PURE__ */ Uint8Array.from({ length: 0x10000 }, (_, code) => {
  const character = String.fromCharCode(code);
  if (/[0-9A-Za-z]/.test(character)) return RUN;
  if (/[\u200b\ufeff\ud800-\udfff]/.test(character)) return OTHER;
  const normalised = normalise(character);
  if (!UNIT_ALONE.test(normalised)) return SEPARATOR;
  return normalised === character ? SINGLE : OTHER;
});

export function units(text) {
  // Local variables and no destructuring: module variables and iterators are slower in a component.
  const found = [];
  const kinds = KINDS;
  const length = text.length;
  let start = 0;
  let n = 0;
  for (let end = 0; end < length; end += 1) {
    const kind = kinds[text.charCodeAt(end)];
    if (kind === RUN) continue;
    if (kind === OTHER) return normalise(text).match(UNIT) ?? [];
    if (start < end) found[n++] = text.slice(start, end).toLowerCase();
    if (kind === SINGLE) found[n++] = text[end];
    start = end + 1;
  }
  if (start < length) found[n] = text.slice(start, length).toLowerCase();
  return found;
}

export function number(text) {
  return valueOf(halfWidth(text));
}

export function numbers(text) {
  const [characters, values] = [Array.from(halfWidth(text)), []];
  const isSign = (c) => DIGITS.has(c) || UNITS.has(c) || ".-点负分之".includes(c);
  for (let start = 0; start < characters.length; ) {
    let end = start;
    while (end < Math.min(characters.length, start + 32) && isSign(characters[end])) end += 1;
    let value;
    while (end > start && (value = valueOf(characters.slice(start, end).join(""))) === undefined) end -= 1;
    if (value !== undefined) values.push(value);
    start = Math.max(end, start + 1);
  }
  return values;
}

function valueOf(text) {
  const unsigned = /^[负-]/.test(text) ? text.slice(1) : text;
  const isPercent = unsigned.startsWith("百分之");
  let value = unsignedValue(isPercent ? unsigned.slice(3) : unsigned);
  if (isPercent && value !== undefined) value /= 100;
  if (value === undefined || value >= END) return undefined;
  return unsigned === text ? value : -value;
}

function unsignedValue(text) {
  if (/^[0-9.]/.test(text)) {
    const found = /^([0-9]+(?:\.[0-9]+)?)([万亿]*)$/.exec(text);
    return found ? Array.from(found[2]).reduce((value, unit) => value * UNITS.get(unit), Number(found[1])) : undefined;
  }
  const point = text.indexOf("点");
  const value = whole(point < 0 ? text : text.slice(0, point));
  if (point < 0 || value === undefined) return value;
  const digits = Array.from(text.slice(point + 1), (c) => DIGITS.get(c));
  return digits.length > 0 && !digits.includes(undefined) ? Number(`${BigInt(value)}.${digits.join("")}`) : undefined;
}

/** An integer in Chinese numerals. */
function whole(text) {
  const characters = Array.from(text);
  if (characters.length === 0) return undefined;
  if (characters.every((c) => DIGITS.has(c))) return characters.reduce((value, c) => value * 10 + DIGITS.get(c), 0);
  // `total`: the value of the sections before, each ended by 万 or 亿. `section`: the current section, below 10,000. `pending`: a digit
  // whose unit has not been read.
  let [total, section, pending] = [0, 0, undefined];
  // `before`: the previous unit; a final digit directly after it counts tenths of it (两千三 is 2300). `below`: units within the section
  // must be smaller than this, since they descend.
  let [before, below] = [1, 1e4];
  for (const [index, character] of characters.entries()) {
    const [digit, unit] = [DIGITS.get(character), UNITS.get(character) ?? 0];
    if (digit !== undefined && pending === undefined && (digit > 0 || index > 0)) {
      if (digit === 0) before = 1;
      else pending = digit;
    } else if (unit > 0 && unit < below && unit < 1e4) {
      if (pending === undefined && !(unit === 10 && index === 0)) return undefined;
      section += (pending ?? 1) * unit;
      [pending, before, below] = [undefined, unit, unit];
    } else if (unit >= 1e4) {
      section += pending ?? 0;
      pending = undefined;
      const closed = total + section;
      if (closed === 0 || (unit === 1e4 && total > 0 && section === 0)) return undefined;
      // 亿 multiplies everything before it, 万 only the section.
      total = unit === 1e4 ? total + section * unit : closed * unit;
      [section, before, below] = [0, unit, 1e4];
    } else {
      return undefined;
    }
  }
  return total + section + (pending ?? 0) * (before >= 100 ? before / 10 : 1);
}

export function editDistance(a, b) {
  const [ofA, ofB] = [Array.from(a), Array.from(b)];
  const row = Array.from({ length: ofB.length + 1 }, (_, j) => j);
  for (const [i, one] of ofA.entries()) {
    let diagonal = row[0];
    row[0] = i + 1;
    for (const [j, other] of ofB.entries()) {
      const replaced = diagonal + (one === other ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = Math.min(replaced, diagonal + 1, row[j] + 1);
    }
  }
  return row[ofB.length];
}

export function rougeL(a, b) {
  const [ofA, ofB] = [units(a), units(b)];
  if (ofA.length === 0 || ofB.length === 0) return 0;
  const row = Array(ofB.length + 1).fill(0);
  for (const one of ofA) {
    let diagonal = 0;
    for (const [j, other] of ofB.entries()) {
      const above = row[j + 1];
      row[j + 1] = one === other ? diagonal + 1 : Math.max(above, row[j]);
      diagonal = above;
    }
  }
  return (2 * row[ofB.length]) / (ofA.length + ofB.length);
}

export function jaccard(a, b, n) {
  const [ofA, ofB] = [new Set(ngrams(units(a), n)), new Set(ngrams(units(b), n))];
  const nUnion = new Set([...ofA, ...ofB]).size;
  return nUnion === 0 ? 0 : (ofA.size + ofB.size - nUnion) / nUnion;
}

export function repetition(text, n) {
  const ofText = units(text);
  // If all units are distinct, all n-grams are.
  if (new Set(ofText).size === ofText.length) return 0;
  const all = ngrams(ofText, n);
  return all.length === 0 ? 0 : 1 - new Set(all).size / all.length;
}

export function softOverlong(length, maxLength, buffer) {
  const free = Math.max(maxLength - buffer, 0);
  if (length <= free) return 0;
  return length <= maxLength ? (free - length) / buffer : -1;
}

/** The n-grams as strings, joined by spaces, which no unit contains. */
function ngrams(ofText, n) {
  const found = [];
  for (let start = 0; start + n <= ofText.length; start += 1) {
    let ngram = ofText[start];
    for (let index = start + 1; index < start + n; index += 1) ngram += ` ${ofText[index]}`;
    found[start] = ngram;
  }
  return found;
}
