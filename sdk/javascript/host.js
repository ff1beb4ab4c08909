// Host functions. Types and their documentation are in index.d.ts.

import { Rejection } from "./types.js";

export class HostCallError extends Rejection {
  constructor(functions, failure) {
    const name = functions.replaceAll("-", "_");
    if (failure) super(`${name}_failed`, failure.message);
    else super(`${name}_not_configured`, `the run has nothing for the host functions \`${functions}\``);
    this.failure = failure;
  }
}

/** The error of a call of an interface that plugin.toml does not declare. */
export function notDeclared(functions) {
  return new TypeError(`\`host\` needs the interface \`${functions}\`; add it to host_functions in plugin.toml`);
}

let call = (functions) => {
  throw new HostCallError(functions);
};

export const host = {
  countTokens: (text) => call("tokens", "count", text),
  splitTokens: (text) => call("tokens", "split", text),
  words: (text) => call("words", "segment", text),
  embed: (texts) => call("similarity", "embed", texts),
  askJudge: (messages) => call("judge", "ask", messages),
  classify: (turns) => call("style-model", "classify", turns),
};

/** Replaces the receiver of calls (interface, function, argument) and returns the previous one. For guest/ and the test kit. */
export function sendCallsTo(receiver) {
  const before = call;
  call = receiver;
  return before;
}
