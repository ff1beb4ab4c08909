// The interface `info`.

import { describe } from "../description.js";
import { settings } from "./host.js";

/** The exports of `info`. `docs`: descriptions of the settings, by key. Runs when the component is built. */
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
        // The bindings convert the thrown object to the contract's error.
        throw { key: error.key, message: error.problem };
      }
    },
  };
}

/** Throws if the plugin's kinds differ from those in plugin.toml. Runs when the component is built. */
export function checked(plugin, announced) {
  if (!plugin?.kinds) {
    throw new TypeError("plugin.js has no default export made by plugin(); expected for example `export default plugin({ reward: Brevity })`");
  }
  const exported = Object.keys(plugin.kinds).sort().join(", ");
  if (exported !== [...announced].sort().join(", ")) {
    throw new TypeError(`plugin.js exports ${exported}; plugin.toml says kinds = ${JSON.stringify(announced)}`);
  }
}
