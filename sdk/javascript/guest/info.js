// The interface `info`.

import { settings } from "./host.js";

export function infoOf(plugin, name, version) {
  return {
    describe: () => ({ name, version }),
    checkSettings() {
      try {
        for (const type of Object.values(plugin.kinds)) new type(settings());
      } catch (error) {
        if (error?.name !== "SettingError") throw error;
        // The bindings turn what is thrown into the contract's error.
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
