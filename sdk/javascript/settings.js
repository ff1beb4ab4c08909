// What the user set for this plugin.

export class SettingError extends Error {
  constructor(key, message) {
    super(`setting \`${key}\`: ${message}`);
    this.name = "SettingError";
    this.key = key;
    /** Expected and got, without the key. */
    this.problem = message;
  }
}

export class Settings {
  #get;

  constructor(values = {}) {
    const texts = new Map(Object.entries(values).map(([key, value]) => [key, asText(value)]));
    this.#get = (key) => texts.get(key);
  }

  static fromSource(get) {
    const settings = new Settings();
    settings.#get = get;
    return settings;
  }

  get(key) {
    return this.#get(key);
  }

  text(key, fallback) {
    return this.get(key) ?? fallback;
  }

  choice(key, fallback, choices) {
    const text = this.text(key, fallback);
    if (!choices.includes(text)) {
      const names = choices.map((choice) => `\`${choice}\``).join(", ");
      throw new SettingError(key, `expected one of ${names}, got \`${text}\``);
    }
    return text;
  }

  number(key, fallback, bounds = {}) {
    return this.#bounded(key, fallback, bounds, "number", (text) => asNumber(text));
  }

  integer(key, fallback, bounds = {}) {
    const read = (text) => (/^[+-]?\d+$/.test(text) ? asNumber(text) : NaN);
    return this.#bounded(key, fallback, bounds, "whole number", read);
  }

  flag(key, fallback) {
    const text = this.get(key);
    if (text === undefined) return fallback;
    if (text !== "true" && text !== "false") {
      throw new SettingError(key, `expected true or false, got \`${text}\``);
    }
    return text === "true";
  }

  texts(key, fallback = []) {
    const text = this.get(key);
    if (text === undefined) return [...fallback];
    const texts = parsed(text);
    if (!Array.isArray(texts) || !texts.every((entry) => typeof entry === "string")) {
      throw new SettingError(key, `expected a list of texts, got \`${text}\``);
    }
    return texts;
  }

  #bounded(key, fallback, { minimum = -Infinity, maximum = Infinity }, what, read) {
    const text = this.get(key);
    if (text === undefined) return fallback;
    const number = read(text.trim());
    if (!Number.isFinite(number) || number < minimum || number > maximum) {
      throw new SettingError(key, `expected a ${what}${inWords(minimum, maximum)}, got \`${text}\``);
    }
    return number;
  }
}

/** As the host renders values: texts as they are, the rest as JSON, which numbers and booleans are too. */
function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** `Number` alone reads blanks as 0 and knows hexadecimal. */
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
