// SDK for querl plugins in JavaScript. Types and their documentation are in index.d.ts.

export { describe } from "./description.js";
export { host, HostCallError } from "./host.js";
export { log } from "./log.js";
export { plugin } from "./plugin.js";
export { SettingError, Settings } from "./settings.js";
export { CallFailure, Candidate, Episode, Message, Rejection } from "./types.js";
export * as text from "./text.js";
export { nChars, stripped } from "./text.js";
