// Runs before the page is painted, so that a chosen theme does not flash in late.
"use strict";
try {
  const chosen = localStorage.getItem("dynaspec-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is barred: the page looks as the system does.
}
