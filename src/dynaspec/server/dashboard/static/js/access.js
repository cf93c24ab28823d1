// Requests with the API key, where the server wants one. The key lives as long as the tab.

import { byId } from "./dom.js";

const KEY = "dynaspec-api-key";

/** `fetch` that asks the person for a key when the server refuses, and tries again with it. */
export async function request(url, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(url, { ...options, headers });
    if (response.status !== 401) return response;
    await ask(key);
  }
}

let asking = null;

/** Several requests may be refused at once; the person is asked once. */
function ask(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return Promise.resolve(); // a newer one has come meanwhile
  asking ??= dialogue(refused !== null).finally(() => {
    asking = null;
  });
  return asking;
}

function dialogue(wrong) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  byId("key-wrong").hidden = !wrong;
  input.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", function closed() {
      if (!input.value.trim()) {
        dialog.showModal(); // nothing here works without
        return;
      }
      dialog.removeEventListener("close", closed);
      sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      resolve();
    });
  });
}
