/** Calls of the API. Every call goes to the page's own origin, with the session's token in `x-api-key`. */
import { learnTime } from "./clock.js";
import { ApiError, jsonOf, refusalIn } from "./errors.js";
import { PATIENCE_MS, endShare, session, token } from "./session.js";

const PAGE = 1000;
const REFUSED_KEY = new Set(["key_unknown", "key_revoked", "key_expired", "http_403"]);

/** GET `path` and return the JSON answer. Throws ApiError. */
export const get = (path, query) => call("GET", path, { query });
/** POST `body` to `path` and return the JSON answer. Throws ApiError. */
export const post = (path, body) => call("POST", path, { body });
/** DELETE `path`. Throws ApiError. */
export const remove = (path) => call("DELETE", path);

/** Make one call and return the JSON answer, null for an answer without a body. Throws ApiError. */
export async function call(method, path, { query, body, headers } = {}) {
  const answer = await fetchAnswer(method, withQuery(path, query), { body, headers });
  return answer.status === 204 ? null : jsonOf(answer);
}

/**
 * Read a list page by page, `pages` at most, and return the last answer with the items of all pages in field `name`.
 *
 * A `next_cursor` in the returned answer tells that the list is longer. Throws ApiError.
 */
export async function getPages(path, name, pages) {
  const items = [];
  let answer;
  for (let read = 0; read < pages && (!answer || answer.next_cursor); read += 1) {
    answer = await get(path, { limit: PAGE, cursor: answer?.next_cursor });
    items.push(...answer[name]);
  }
  return { ...answer, [name]: items };
}

/** Read `path` unless it still has `etag`; returns `{changed, data, etag}`. Throws ApiError. */
export async function getIfChanged(path, etag) {
  const answer = await fetchAnswer("GET", path, { headers: etag ? { "if-none-match": etag } : {} });
  if (answer.status === 304) return { changed: false, etag };
  return { changed: true, data: await jsonOf(answer), etag: answer.headers.get("etag") };
}

/** Append the set values of `query` to `path`. */
export function withQuery(path, query = {}) {
  const set = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return set.length ? `${path}?${new URLSearchParams(set)}` : path;
}

async function fetchAnswer(method, path, { body, headers = {} }, fresh = false) {
  const { shared } = session.value;
  const sent = { ...headers, "x-api-key": await token({ fresh }) };
  if (body !== undefined) sent["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: sent,
      body: body && JSON.stringify(body),
      credentials: "omit",
      signal: AbortSignal.timeout(PATIENCE_MS),
    });
  } catch (cause) {
    throw ApiError.unreachable(cause);
  }
  learnTime(answer);
  if (answer.ok || answer.status === 304) return answer;
  const refusal = await refusalIn(answer);
  // The authorizer refuses a token that ended early: one new token tells whether the session has ended, too.
  const refusedToken = refusal.status === 401 || REFUSED_KEY.has(refusal.code);
  if (refusedToken && shared) endShare(refusal);
  else if (refusedToken && !fresh) return fetchAnswer(method, path, { body, headers }, true);
  throw refusal;
}
