// Light, dark, or as the system; and the colours of style sheets for canvases.

const KEY = "dynaspec-theme";
const ORDER = ["auto", "light", "dark"];
const WORDS = { auto: "Auto", light: "Light", dark: "Dark" };

const root = document.documentElement;
const probe = document.createElement("span");
const known = new Map();

/** A custom property's colour as it is now, in a form that canvases understand. */
export function colour(name) {
  if (!known.has(name)) known.set(name, resolve(name));
  return known.get(name);
}

/** Makes `button` go through the themes; `changed` is called whenever colours have changed. */
export function initTheme(button, changed) {
  probe.hidden = true;
  document.body.append(probe);
  const tell = () => {
    known.clear();
    changed();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
  show(button);
  button.addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(current()) + 1) % ORDER.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    keep(next);
    show(button);
    tell();
  });
}

function current() {
  return root.dataset.theme ?? "auto";
}

function keep(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // Storage is barred: the choice holds until the page is left.
  }
}

function show(button) {
  button.querySelector(".theme-word").textContent = WORDS[current()];
}

function resolve(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
