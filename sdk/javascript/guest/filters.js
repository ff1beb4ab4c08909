// The interface `filters`.

import * as host from "./host.js";

export function filtersOf(plugin) {
  return {
    checkBatch(samples) {
      const filter = new plugin.kinds.filter(host.settings());
      return samples.map((sample) => verdict(filter, { ...sample, columns: host.columns(sample.columns) }));
    },
  };
}

function verdict(filter, sample) {
  let kept;
  try {
    kept = filter.check(sample);
  } catch (error) {
    return { tag: "drop", val: host.rejection(error) };
  }
  if (kept !== undefined) {
    throw new TypeError(`check() returned ${JSON.stringify(kept)}; expected nothing for a sample that stays, or a thrown Rejection`);
  }
  return { tag: "keep" };
}
