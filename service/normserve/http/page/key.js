// The API key that GET /metrics asks for where the server has a file of keys: kept while the tab is open, and sent to
// the server that this page came from, to nobody else.

const KEPT_AS = "normserve-api-key";
// What can stand in a header; a key has nothing else.
const POSSIBLE = /^[\x21-\x7e]+$/;

const form = document.getElementById("key-form");
const input = document.getElementById("key");
const hint = document.getElementById("key-hint");

/** The headers of a request, with the key if there is one. */
export function credentials() {
  const key = sessionStorage.getItem(KEPT_AS);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Whether the server refused the key, or that there was none. */
export function isRefused(answer) {
  return answer.status === 401 || answer.status === 403;
}

/** Forget the key and ask for another; `reason` is what the server said. */
export function askForKey(reason) {
  sessionStorage.removeItem(KEPT_AS);
  hint.textContent = reason;
  form.hidden = false;
}

/** Nothing can be read before somebody has typed a key: to ask in vain would fill the server's log. */
export function isWaitingForKey() {
  return !form.hidden;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const key = input.value.trim();
  if (!POSSIBLE.test(key)) {
    hint.textContent = "A key has letters, digits and signs only.";
    return;
  }
  sessionStorage.setItem(KEPT_AS, key);
  input.value = "";
  form.hidden = true;
});
