// Reward for a rewrite in the script of its query, as an approximation of its language. README.md has the formula.

import { plugin, Rejection, text } from "#querl-sdk";

/** Texts are cut to this number of UTF-16 code units, because each character costs fuel. */
const MAX_LENGTH = 100;
/** Scripts with their first and last UTF-16 code unit. The engine of a component has no `\p{Script=...}`. */
const RANGES = [
  ["latin", 0x61, 0x7a],
  ["latin", 0xc0, 0x24f],
  ["latin", 0x1e00, 0x1eff],
  ["han", 0x3005, 0x3007],
  ["han", 0x3400, 0x9fff],
  ["han", 0xf900, 0xfaff],
  // High surrogates of the planes 2 and 3.
  ["han", 0xd840, 0xd8bf],
  ["kana", 0x3041, 0x30ff],
  ["kana", 0xff66, 0xff9f],
  ["hangul", 0x1100, 0x11ff],
  ["hangul", 0x3130, 0x318f],
  ["hangul", 0xac00, 0xd7af],
  ["greek", 0x370, 0x3ff],
  ["cyrillic", 0x400, 0x52f],
  ["hebrew", 0x590, 0x5ff],
  ["arabic", 0x600, 0x77f],
  ["devanagari", 0x900, 0x97f],
  ["thai", 0xe00, 0xe7f],
];
const SCRIPTS = RANGES.map(([script]) => script);
// Index of the script by code unit. Built with the component: a search in `RANGES` would take thousands of instructions per character.
const SCRIPT_OF = new Uint8Array(0x10000).fill(SCRIPTS.length);
RANGES.forEach(([, first, last], index) => SCRIPT_OF.fill(index, first, last + 1));

export class Language {
  static requires = [];

  constructor(settings) {
    this.tolerated = settings.number("tolerated", 0.3, { minimum: 0, maximum: 0.9 });
  }

  range() {
    return [0, 1];
  }

  score({ query, policy: { rewrite = "" } }) {
    const language = mostFrequent(counts(query));
    if (language === undefined) throw new Rejection("query_without_letters", "the query has no letters to tell its language by");
    const found = counts(rewrite);
    let n = 0;
    for (const script in found) n += found[script];
    const share = n === 0 ? 0 : (found[language] ?? 0) / n;
    return { total: Math.min(1, share / (1 - this.tolerated)), components: { share } };
  }
}

/** Number of units by script, in order of first occurrence. In a Japanese text, Han characters count as kana. */
function counts(of) {
  const found = {};
  const units = text.units(of.length > MAX_LENGTH ? of.slice(0, MAX_LENGTH) : of);
  for (let index = 0; index < units.length; index += 1) {
    const unit = units[index];
    let first = 0;
    // Skip leading digits of a run of digits and letters.
    while (unit.charCodeAt(first) <= 0x39) first += 1;
    // `undefined` for digits, symbols and scripts that are not in the table.
    const script = SCRIPTS[SCRIPT_OF[unit.charCodeAt(first)]];
    if (script) found[script] = (found[script] ?? 0) + 1;
  }
  const { han = 0, kana = 0 } = found;
  // Text is Japanese if at least one in five of its Han and kana characters is kana (particles). Chinese text may contain a decorative の.
  if (kana * 4 >= han && kana > 0) {
    delete found.han;
    found.kana = han + kana;
  }
  return found;
}

/** The script with the largest count, the first of equal ones; `undefined` if there is none. */
function mostFrequent(found) {
  let most;
  for (const script in found) {
    if (most === undefined || found[script] > found[most]) most = script;
  }
  return most;
}

export default plugin({ reward: Language });
