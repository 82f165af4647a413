// Everything that is asked of the server: relative addresses, JSON both ways, and the stream of states.

const SILENT_MS = 15_000; // three of the server's beats

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, method = "GET", body = undefined) {
  const options = { method, headers: { accept: "application/json" } };
  if (method !== "GET") options.headers["content-type"] = "application/json";
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Refused(0, "The server does not answer. It may be restarting, or the tunnel to it may be gone.");
  }
  if (response.status === 401) {
    location.reload(); // the cookie's time is over: the same address shows the way in
    throw new Refused(401, "Log in again.");
  }
  const text = await response.text();
  let said = null;
  try {
    said = text ? JSON.parse(text) : null;
  } catch {
    // a proxy's own page of HTML
  }
  if (!response.ok) throw new Refused(response.status, said?.error?.message ?? `The server answered with status ${response.status}.`);
  return said;
}

// Calls `onState` with each state and `onStanding` with "live", "draining" or "lost".
export function follow(onState, onStanding) {
  let silence = 0;
  const lost = () => onStanding("lost");
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(lost, SILENT_MS);
  };
  const open = () => {
    const source = new EventSource("admin/api/events");
    source.onmessage = (event) => {
      heard();
      const state = JSON.parse(event.data);
      onState(state);
      onStanding(state.is_draining ? "draining" : "live");
    };
    source.onerror = () => {
      lost();
      if (source.readyState !== EventSource.CLOSED) return; // it comes back by itself
      setTimeout(() => ask("admin/api/state").then(open, () => setTimeout(open, 5_000)), 2_000);
    };
  };
  heard();
  open();
}
