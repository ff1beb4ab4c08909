// Forwards calls of host functions to the host. `querl plugin build` writes the module that imports the declared interfaces.

import { HostCallError, notDeclared, sendCallsTo } from "../host.js";
import * as host from "./host.js";

export function connect(interfaces) {
  sendCallsTo((name, method, argument) => {
    if (!interfaces[name]) {
      throw notDeclared(name);
    }
    let result;
    try {
      result = interfaces[name][method](argument);
    } catch (error) {
      const reason = error?.payload ?? error;
      if (reason?.tag === "failed") throw new HostCallError(name, host.callFailure(reason.val));
      if (reason?.tag === "not-configured") throw new HostCallError(name);
      throw error;
    }
    // The bindings return a list of f32 as a typed array.
    return name === "similarity" ? Array.from(result, (vector) => Array.from(vector)) : result;
  });
}
