/** Colors: of the system, or as the reader has chosen for this tab. */
import { signal } from "../core/signal.js";

const ORDER = ["system", "light", "dark"];
const SYSTEM_DARK = matchMedia("(prefers-color-scheme: dark)");

export const theme = signal("system");
/** The colors on the screen, "light" or "dark", for drawings that no style sheet reaches. */
export const shownColors = signal(shown());

/** Choose the next colors: of the system, light, dark. */
export function nextTheme() {
  theme.value = ORDER[(ORDER.indexOf(theme.value) + 1) % ORDER.length];
  if (theme.value === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
  shownColors.value = shown();
}

function shown() {
  return theme.value === "system" ? (SYSTEM_DARK.matches ? "dark" : "light") : theme.value;
}

SYSTEM_DARK.addEventListener("change", () => (shownColors.value = shown()));
