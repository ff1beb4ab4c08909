// The interface `info`.

import { describe } from "../description.js";
import { settings } from "./host.js";

/** The exports of `info`; `docs` are sentences about settings, by key. The description is made when the component is built. */
export function infoOf(plugin, name, version, docs) {
  const described = describe(plugin);
  const description = {
    name,
    version,
    kinds: described.kinds.map((tag) => ({ tag })),
    settings: described.settings.map((spec) => ({ ...spec, valueType: { tag: spec.valueType }, doc: docs[spec.key] })),
    range: described.range && { min: described.range[0], max: described.range[1] },
    inputs: Object.entries(described.inputs).map(([tag, required]) => ({ input: { tag }, required })),
  };
  return {
    describe: () => description,
    checkSettings() {
      try {
        for (const type of Object.values(plugin.kinds)) new type(settings());
      } catch (error) {
        if (error?.name !== "SettingError") throw error;
        // The bindings make the contract's error of what is thrown.
        throw { key: error.key, message: error.problem };
      }
    },
  };
}

/** Refuses a plugin whose classes are not those that plugin.toml announces. Runs when the component is built. */
export function checked(plugin, announced) {
  if (!plugin?.kinds) {
    throw new TypeError("plugin.js has no default export made by plugin(); expected for example `export default plugin({ reward: Brevity })`");
  }
  const exported = Object.keys(plugin.kinds).sort().join(", ");
  if (exported !== [...announced].sort().join(", ")) {
    throw new TypeError(`plugin.js exports ${exported}; plugin.toml says kinds = ${JSON.stringify(announced)}`);
  }
}
