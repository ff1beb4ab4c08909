// Lines for a person who is looking for a mistake: to stderr natively, to the host's log in a component.

let write = (level, message) => console.error(`${level}: ${message}`);

export const log = {
  debug: (message) => write("debug", message),
  info: (message) => write("info", message),
  warn: (message) => write("warn", message),
  error: (message) => write("error", message),
};

/** Has lines go elsewhere. For the glue in guest/ only. */
export function sendLogTo(receiver) {
  write = receiver;
}
