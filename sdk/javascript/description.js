// The description of a plugin (`info.describe` of the contract), derived from its classes.

import { Settings } from "./settings.js";
import { shown } from "./types.js";

/** The inputs that a reward may declare. A filter may declare `columns` only. */
export const INPUTS = ["response", "prompt", "columns", "baseline", "retrieval", "judgement", "style"];

/** Kinds, settings, range and inputs of a plugin. Constructs each class without settings and records the keys that it reads. */
export function describe({ kinds }) {
  const [settings, inputs, plugins] = [new Map(), new Map(), []];
  for (const type of Object.values(kinds)) {
    const recorded = [];
    try {
      plugins.push(new type(Settings.recording(recorded)));
    } catch (error) {
      if (error?.name !== "SettingError") throw error;
      const rule = "expected a constructor that finishes without settings, so that what it reads can be described";
      throw new TypeError(`\`${type.name}\` refuses its defaults, ${error.message}; ${rule}`);
    }
    for (const spec of recorded) {
      const known = settings.get(spec.key) ?? spec;
      if (JSON.stringify(known) !== JSON.stringify(spec)) {
        throw new TypeError(`the setting \`${spec.key}\` is read in two ways; read it in one`);
      }
      settings.set(spec.key, spec);
    }
    for (const name of type.uses ?? []) inputs.set(name, inputs.get(name) ?? false);
    for (const name of type.requires ?? []) inputs.set(name, true);
  }
  const specs = [...settings.values()];
  const scorer = plugins.find((plugin) => typeof plugin.range === "function");
  const range = scorer && specs.every((spec) => spec.default !== undefined) ? rangeOf(scorer) : undefined;
  return { kinds: Object.keys(kinds), settings: specs, range, inputs: Object.fromEntries(inputs) };
}

/** The range of a reward. Throws if its `range` does not return two numbers. */
export function rangeOf(plugin) {
  const range = plugin.range();
  if (Array.isArray(range) && range.length === 2 && range.every((bound) => typeof bound === "number")) return range;
  throw new TypeError(`\`${plugin.constructor.name}.range\` returned ${shown(range)}; expected two numbers [low, high]`);
}
