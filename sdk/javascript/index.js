// What the author of a querl plugin in JavaScript needs. Types and their documentation are in index.d.ts.

export { log } from "./log.js";
export { plugin } from "./plugin.js";
export { SettingError, Settings } from "./settings.js";
export { CallFailure, Candidate, Episode, Message, Rejection } from "./types.js";
export { ClassifyError } from "./style.js";
export { nChars, stripped } from "./text.js";
