// Debug log: to stderr natively, to the host's log in a component.

let write = (level, message) => console.error(`${level}: ${message}`);

export const log = {
  debug: (message) => write("debug", message),
  info: (message) => write("info", message),
  warn: (message) => write("warn", message),
  error: (message) => write("error", message),
};

/** Replaces the receiver of log lines. For guest/ only. */
export function sendLogTo(receiver) {
  write = receiver;
}
