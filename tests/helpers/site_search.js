// Print the pages that the site's own search finds for each question: node site_search.js SITE '["question", ...]'
const fs = require("fs"), path = require("path");
const [site, questions] = [process.argv[2], JSON.parse(process.argv[3])];
const workers = path.join(site, "assets/javascripts/workers");
const script = fs.readdirSync(workers).find((name) => /^search.*\.js$/.test(name));

// The script is a web worker: it adds one listener, and answers each message with one message.
let listener, answer;
globalThis.self = globalThis;
globalThis.addEventListener = (_, given) => { listener = given; };
globalThis.postMessage = (message) => answer(message.data);
(0, eval)(fs.readFileSync(path.join(workers, script), "utf8"));
const ask = (type, data) => new Promise((resolve) => { answer = resolve; listener({ data: { type, data } }); });

(async () => {
  const { config, docs } = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")));
  await ask(0, { config, docs, options: { suggest: true } });
  const found = {};
  for (const question of questions) {
    const { items } = await ask(2, question);
    found[question] = items.map(([section]) => section.location.split("#")[0].replace(/\/$/, ""));
  }
  console.log(JSON.stringify(found));
})();
