// The user's settings of a plugin, and typed readers for them.

export class SettingError extends Error {
  constructor(key, message) {
    super(`setting \`${key}\`: ${message}`);
    this.name = "SettingError";
    this.key = key;
    /** The expected and the actual value, without the key. */
    this.problem = message;
  }
}

export class Settings {
  #get;
  #recorded;

  constructor(values = {}) {
    const texts = new Map(Object.entries(values).map(([key, value]) => [key, asText(value)]));
    this.#get = (key) => texts.get(key);
  }

  static fromSource(get) {
    const settings = new Settings();
    settings.#get = get;
    return settings;
  }

  /** Empty settings that append every read to `into`. A reader without a fallback returns some valid value. */
  static recording(into) {
    const settings = new Settings();
    settings.#recorded = into;
    return settings;
  }

  get(key) {
    this.#record({ key, valueType: "text" }, "");
    return this.#get(key);
  }

  text(key, fallback) {
    this.#record({ key, valueType: "text" }, fallback);
    return this.#get(key) ?? this.#absent(key, "a text", fallback, "");
  }

  choice(key, fallback, choices) {
    this.#record({ key, valueType: "text", choices: [...choices] }, fallback);
    const names = `one of ${choices.map((choice) => `\`${choice}\``).join(", ")}`;
    const text = this.#get(key);
    if (text === undefined) return this.#absent(key, names, fallback, choices[0]);
    if (!choices.includes(text)) throw new SettingError(key, `expected ${names}, got \`${text}\``);
    return text;
  }

  number(key, fallback, bounds = {}) {
    return this.#bounded("number", key, fallback, bounds, "number", (text) => asNumber(text));
  }

  integer(key, fallback, bounds = {}) {
    const read = (text) => (/^[+-]?\d+$/.test(text) ? asNumber(text) : NaN);
    return this.#bounded("integer", key, fallback, bounds, "whole number", read);
  }

  flag(key, fallback) {
    this.#record({ key, valueType: "flag" }, fallback);
    const text = this.#get(key);
    if (text === undefined) return this.#absent(key, "true or false", fallback, false);
    if (text !== "true" && text !== "false") {
      throw new SettingError(key, `expected true or false, got \`${text}\``);
    }
    return text === "true";
  }

  texts(key, fallback = []) {
    this.#record({ key, valueType: "texts" }, fallback);
    const text = this.#get(key);
    if (text === undefined) return [...fallback];
    const texts = parsed(text);
    if (!Array.isArray(texts) || !texts.every((entry) => typeof entry === "string")) {
      throw new SettingError(key, `expected a list of texts, got \`${text}\``);
    }
    return texts;
  }

  #bounded(valueType, key, fallback, { minimum = -Infinity, maximum = Infinity }, noun, read) {
    const bound = (value) => (Number.isFinite(value) ? value : undefined);
    this.#record({ key, valueType, minimum: bound(minimum), maximum: bound(maximum) }, fallback);
    const expected = `a ${noun}${inWords(minimum, maximum)}`;
    const text = this.#get(key);
    if (text === undefined) return this.#absent(key, expected, fallback, bound(minimum) ?? bound(maximum) ?? 0);
    const number = read(text.trim());
    if (!Number.isFinite(number) || number < minimum || number > maximum) {
      throw new SettingError(key, `expected ${expected}, got \`${text}\``);
    }
    return number;
  }

  /** The fallback. Without one: `usable` while reads are recorded, else an error. */
  #absent(key, expected, fallback, usable) {
    if (fallback !== undefined) return fallback;
    if (!this.#recorded) throw new SettingError(key, `expected ${expected}, got nothing; set it`);
    return usable;
  }

  #record(spec, fallback) {
    this.#recorded?.push({ ...spec, default: fallback === undefined ? undefined : asText(fallback) });
  }
}

/** The text form that the host uses: strings unchanged, all other values as JSON. */
function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Stricter than `Number`, which converts blank text to 0 and accepts hexadecimal. */
function asNumber(text) {
  return /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? Number(text) : NaN;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function inWords(minimum, maximum) {
  if (minimum > -Infinity && maximum < Infinity) return ` from ${minimum} to ${maximum}`;
  if (minimum > -Infinity) return ` of at least ${minimum}`;
  return maximum < Infinity ? ` of at most ${maximum}` : "";
}
