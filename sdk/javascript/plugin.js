// Registers the classes of a plugin.

import { INPUTS } from "./description.js";

/** For each argument of `plugin()`: the kind's name in plugin.toml, and the required methods. */
const KINDS = {
  prompt: ["prompt", ["messages", "parseRewrite", "parseJudgement"]],
  filter: ["filter", ["check"]],
  reward: ["reward", ["range", "score"]],
  groupReward: ["group-reward", ["range", "scoreGroup"]],
  styleScorer: ["style-scorer", ["score"]],
};

export function plugin(classes) {
  const kinds = {};
  for (const [name, type] of Object.entries(classes)) {
    if (!(name in KINDS)) {
      throw new TypeError(`plugin() names the kind \`${name}\`; the kinds are ${Object.keys(KINDS).join(", ")}`);
    }
    const [kind, methods] = KINDS[name];
    if (typeof type !== "function") {
      throw new TypeError(`plugin() has ${String(type)} as ${name}; expected a class`);
    }
    const missing = methods.find((method) => typeof type.prototype?.[method] !== "function");
    if (missing) {
      throw new TypeError(`\`${type.name}\` has no method \`${missing}\`, which a ${kind} needs`);
    }
    checkInputs(type, methods.includes("range") ? INPUTS : ["columns"]);
    kinds[kind] = type;
  }
  if (kinds.reward && kinds["group-reward"]) {
    throw new TypeError("plugin() has a reward and a group reward; expected one of them, and another plugin for the other");
  }
  if (Object.keys(kinds).length === 0) {
    throw new TypeError("plugin() names no class; expected for example `plugin({ reward: Brevity })`");
  }
  return { kinds };
}

function checkInputs(type, known) {
  for (const name of ["requires", "uses"]) {
    const inputs = type[name] ?? [];
    if (!Array.isArray(inputs) || !inputs.every((input) => known.includes(input))) {
      throw new TypeError(`\`${type.name}.${name}\` is ${JSON.stringify(inputs)}; expected a list of ${known.join(", ")}`);
    }
  }
}
