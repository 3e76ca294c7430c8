// Looks at every page of the book in a real browser, 1,400 and 390 pixels wide: `make book-check`.
// It fails on console errors, requests to other hosts, what is not found, diagrams that are not drawn, pages that are
// wider than the screen, and tables that can neither be seen whole nor scrolled.
const { execFileSync } = require("child_process");
const fs = require("fs");
const http = require("http");
const path = require("path");
const { chromium } = require("playwright-core");

const folder = path.resolve(process.argv[2]);
const WIDTHS = [1400, 390];
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".png": "image/png" };

function browser() {
  for (const name of [process.env.CHROMIUM, "chromium", "chromium-browser", "google-chrome"].filter(Boolean)) {
    try {
      return execFileSync("which", [name], { encoding: "utf8" }).trim();
    } catch {}
  }
  console.error("no browser: install chromium, or set CHROMIUM to one");
  process.exit(2);
}

const server = http.createServer((request, response) => {
  const file = path.join(folder, decodeURIComponent(new URL(request.url, "http://localhost").pathname));
  if (!file.startsWith(folder) || !fs.existsSync(file) || fs.statSync(file).isDirectory()) return response.writeHead(404).end();
  response.writeHead(200, { "Content-Type": TYPES[path.extname(file)] || "application/octet-stream" });
  fs.createReadStream(file).pipe(response);
});

// Runs in the page. What is wrong with what it looks like at this width, in words.
function faults() {
  const found = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.push(`is ${document.documentElement.scrollWidth} pixels wide`);
  for (const table of document.querySelectorAll("article table")) {
    let box = table.parentElement;
    while (box && !["auto", "scroll"].includes(getComputedStyle(box).overflowX)) box = box.parentElement;
    const seen = (box || table).getBoundingClientRect();
    const words = `the table "${table.innerText.slice(0, 40).replace(/\s+/g, " ")}"`;
    if (table.offsetParent === null) continue; // folded away
    if (seen.left < 0 || seen.right > width + 1) found.push(`${words} is cut off`);
    if (parseFloat(getComputedStyle(table).fontSize) < 11) found.push(`${words} is in tiny letters`);
    for (const cell of table.querySelectorAll("td, th"))
      if (cell.scrollWidth > cell.clientWidth + 1 && getComputedStyle(cell).overflowX === "hidden") found.push(`${words} hides text`);
  }
  for (const picture of document.images)
    if (picture.complete && !picture.naturalWidth) found.push(`the picture ${picture.src} is not shown`);
  for (const diagram of document.querySelectorAll("pre.mermaid")) {
    const drawing = diagram.querySelector("svg");
    if (!drawing || drawing.getAttribute("aria-roledescription") === "error") found.push("a diagram is not drawn");
    else if (drawing.getBoundingClientRect().width < 0.59 * drawing.viewBox.baseVal.width) found.push("a diagram is drawn too small");
  }
  return found;
}

async function look(context, base, name) {
  const found = [];
  const page = await context.newPage();
  page.on("console", (message) => message.type() === "error" && found.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => found.push(`console: ${error.message}`));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(base) && !/^(data|blob):/.test(url)) found.push(`asks another host: ${url}`);
  });
  page.on("response", (response) => response.status() >= 400 && found.push(`not found: ${response.url()}`));
  await page.goto(`${base}/${name}`, { waitUntil: "load" });
  await page.waitForFunction(() => [...document.querySelectorAll("pre.mermaid")].every((each) => each.querySelector("svg")), null, { timeout: 20000 }).catch(() => {});
  for (const width of WIDTHS) {
    await page.setViewportSize({ width, height: 1000 });
    found.push(...(await page.evaluate(faults)).map((fault) => `at ${width} pixels ${fault}`));
  }
  await page.close();
  return found.map((fault) => `${name}: ${fault}`);
}

server.listen(0, "127.0.0.1", async () => {
  const base = `http://127.0.0.1:${server.address().port}`;
  const started = await chromium.launch({ executablePath: browser(), args: ["--no-sandbox"] });
  const context = await started.newContext();
  const names = fs.readdirSync(folder, { recursive: true }).filter((name) => name.endsWith(".html")).sort();
  const found = [];
  for (const name of names) found.push(...(await look(context, base, name)));
  await started.close();
  server.close();
  console.log([...found, `${names.length} pages looked at, ${found.length} faults`].join("\n"));
  process.exit(found.length || !names.length ? 1 : 0);
});
