// Making and finding elements. Text only ever goes in as text.

export const byId = (id) => document.getElementById(id);

/** An element with properties, attributes (`data-…`, `aria-…` and such) and children: elements or text. */
export function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Sets text only where it differs, so that nothing is selected away or read out again. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
