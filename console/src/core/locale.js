/**
 * Give the browser the language en-US if the browser's own is no language tag, as "en-US@posix" of a machine with the locale C:
 * uPlot hands the language to Intl when uPlot is loaded, Intl throws, and the page would stay blank.
 */
try {
  Intl.getCanonicalLocales(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
