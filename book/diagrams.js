// Draws the diagrams of a page in the colors of its theme, and again when the reader changes it.
const diagrams = [...document.querySelectorAll("pre.mermaid")].map((place) => [place, place.textContent]);
const darkByDefault = matchMedia("(prefers-color-scheme: dark)");

async function drawDiagrams() {
  const theme = document.body.dataset.theme;
  const dark = theme === "dark" || (theme !== "light" && darkByDefault.matches);
  const flowchart = { wrappingWidth: 400 }; // wide enough for the lines as they are written
  mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "neutral", fontFamily: "inherit", flowchart });
  for (const [place, source] of diagrams) {
    place.textContent = source;
    delete place.dataset.processed;
  }
  await mermaid.run({ nodes: diagrams.map(([place]) => place) });
  // On a phone a wide diagram is made smaller only as long as it can be read; beyond that it scrolls.
  for (const drawing of document.querySelectorAll("pre.mermaid svg"))
    drawing.style.minWidth = `${0.6 * drawing.viewBox.baseVal.width}px`;
}

drawDiagrams();
new MutationObserver(drawDiagrams).observe(document.body, { attributeFilter: ["data-theme"] });
darkByDefault.addEventListener("change", drawDiagrams);
