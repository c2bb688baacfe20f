/**
 * The session of this page: a short-lived token in memory, renewed from the cookie that scripts cannot read.
 *
 * `state` is "unknown" until the first answer, then "in" or "out"; `reason` is the refusal that ended a session.
 */
import { learnTime, now_s } from "./clock.js";
import { ApiError, jsonOf, refusalIn } from "./errors.js";
import { signal } from "./signal.js";

const RENEW_BEFORE_S = 60;
/** Longest wait for an answer; API Gateway ends each request within 30 s. */
export const PATIENCE_MS = 31_000;

export const session = signal({ state: "unknown" });
let renewal = null;

/** Return the token for `x-api-key`; renew a token that ends soon. Throws ApiError, status 401 if nobody is signed in. */
export async function token({ fresh = false } = {}) {
  const held = session.value;
  if (held.shared) return held.token;
  if (!fresh && held.token && held.expires_at - now_s() > RENEW_BEFORE_S) return held.token;
  renewal ??= renew().finally(() => (renewal = null));
  return (await renewal).token;
}

/** Return `{tenant, key_id, key_name, scopes}` of a one-time link's `code`, which stays valid. Throws ApiError. */
export const previewOf = (code) => post("/sessions/preview", { code });

/** Sign in with `{code}` of a one-time link or with `{key}`. Throws ApiError. */
export async function signIn(proof) {
  await post("/sessions", proof);
  await token({ fresh: true });
}

/** Read with the key of a shared job, which shows this job alone and stays in memory: a reload needs the link again. */
export function openShare(key) {
  session.value = { state: "in", token: key, expires_at: Infinity, scopes: ["view"], shared: true };
}

/** End a shared view whose key the API refuses: no other key replaces the key of a link. */
export function endShare(refusal) {
  session.value = { state: "out", reason: refusal };
}

/** End the session here and on the server. */
export async function signOut() {
  await send("DELETE", "/sessions/current");
  session.value = { state: "out" };
}

/** Return true if the session's key has `scope`. No scope contains another one. */
export const may = (scope) => (session.value.scopes ?? []).includes(scope);

async function renew() {
  try {
    const answer = await post("/sessions/token");
    session.value = { ...answer, state: "in" };
    return answer;
  } catch (error) {
    if (error.status === 401 || error.status === 403) session.value = { state: "out", reason: error };
    throw error;
  }
}

async function post(path, body) {
  const answer = await send("POST", path, body);
  return answer.status === 204 ? null : jsonOf(answer);
}

async function send(method, path, body) {
  const headers = body ? { "content-type": "application/json" } : {};
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers,
      body: body && JSON.stringify(body),
      credentials: "same-origin",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
  } catch (cause) {
    throw ApiError.unreachable(cause);
  }
  learnTime(answer);
  if (!answer.ok) throw await refusalIn(answer);
  return answer;
}
