// The page of the gateway. All texts are set by textContent: nothing that it shows is read as HTML.

const INTERVAL_MS = 1000;
const HISTORY = 120; // Points of the line: the last two minutes.
const OLD_S = 5; // Older figures are said to be old.
const FIRST = 8; // Numbers of a vector, weights of a sparse one, vectors of a text.
const KEY = "batchery-key";
const NONE = "–";
const MAX_CHARS = 4000; // Of a result that is shown as JSON.
const FILES_INTERVAL_MS = 3000;
const SHOWN_FILES = 10;

// Kinds of models that take more than a text.
const MORE = {
  rerank: { name: "Query", example: "What was delicious?" },
  zero_shot_image_classification: { name: "Labels, with commas between them", example: "a cat, a dog" },
};

// Kinds of models that take files, and what a file chooser shows for them.
const FILES = {
  image_embedding: "image",
  image_classification: "image",
  zero_shot_image_classification: "image",
  object_detection: "image",
  audio_classification: "audio",
  audio_embedding: "audio",
  transcription: "audio",
};

// What a call of each kind of model posts, and where; all others can be tried as this page does.
const CALLS = {
  embedding: (model) => ["/v1/embeddings", { model, input: "The food was delicious" }],
  sparse_embedding: (model) => ["/embed_sparse", { model, inputs: "The food was delicious" }],
  multi_vector_embedding: (model) => ["/embed_all", { model, inputs: "The food was delicious" }],
  classification: (model) => ["/predict", { model, inputs: "The food was delicious" }],
  image_embedding: (model) => ["/v1/embeddings", { model, input: [{ text: "food on a plate" }] }],
  audio_embedding: (model) => ["/v1/embeddings", { model, input: [{ text: "rain on a roof" }] }],
  generation: (model) => ["/v1/chat/completions", { model, messages: chatOf("Tell me a story"), stream: true }],
  rerank: (model) => ["/v1/rerank", { model, query: MORE.rerank.example, documents: ["The food", "The rain"] }],
};

const history = [];
let filesDue = 0;
let models = "";

const id = (name) => document.getElementById(name);

function make(tag, text = "", classes = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = classes;
  return element;
}

// Numbers

function number(value, digits = 0) {
  if (value === null || value === undefined) return NONE;
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: 0 });
}

const rate = (value) => number(value, value !== null && value < 100 ? 1 : 0);
const percent = (share) => (share === null ? NONE : `${number(100 * share)} %`);

function age(seconds) {
  if (seconds === null) return NONE;
  if (seconds < 1) return `${number(1000 * seconds)} ms`;
  if (seconds < 120) return `${number(seconds, 1)} s`;
  if (seconds < 7200) return `${number(seconds / 60, 1)} min`;
  return `${number(seconds / 3600, 1)} h`;
}

function bytes(size) {
  if (size === null) return NONE;
  if (size < 2 ** 20) return `${number(size / 2 ** 10, 1)} KiB`;
  return size < 2 ** 30 ? `${number(size / 2 ** 20)} MiB` : `${number(size / 2 ** 30, 1)} GiB`;
}

// The gateway

async function send(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { ...options, headers, cache: "no-store" });
}

async function ask(path, options = {}) {
  return read(await send(path, options));
}

async function read(response) {
  const key = sessionStorage.getItem(KEY);
  const body = await response.json();
  if (response.status === 401) askForKey(key ? "This key is not known." : "");
  const why = body.detail ?? body.error?.message ?? `status ${response.status}`;
  if (!response.ok) throw new Refused(why, response.status);
  return body;
}

class Refused extends Error {
  constructor(text, status) {
    super(text);
    this.status = status;
  }
}

function askForKey(error) {
  sessionStorage.removeItem(KEY);
  id("figures").hidden = true;
  id("login_error").textContent = error;
  if (id("login").hidden) {
    id("login").hidden = false;
    id("key").focus();
  }
  say("needs a key", "warn");
  notices([]);
}

id("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, id("key").value.trim());
  id("key").value = "";
  id("login").hidden = true;
  models = "";
  filesDue = 0;
  look();
});

// The figures

let timer;

async function look() {
  clearTimeout(timer);
  if (document.hidden) return; // The workers are asked only while somebody looks.
  try {
    show(await ask("/status"));
  } catch (error) {
    if (error.status === 401) return; // It goes on once there is a key.
    say("no answer", "bad");
    const why = error instanceof Refused ? error.message : "is it still running?";
    notices([`The gateway does not answer: ${why} The figures below are old.`]);
  }
  timer = setTimeout(look, INTERVAL_MS);
}

document.addEventListener("visibilitychange", look);

function show(status) {
  id("figures").hidden = false;
  showState(status);
  showThroughput(status.throughput);
  const waiting = status.queues.reduce((sum, queue) => sum + queue.waiting, 0);
  const ages = status.queues.map((queue) => queue.oldest_s).filter((each) => each !== null);
  const known = status.problem === null;
  id("waiting").textContent = known ? number(waiting) : NONE;
  id("oldest").textContent = ages.length ? age(Math.max(...ages)) : NONE;
  id("items").textContent = known ? number(status.items) : NONE;
  id("jobs").textContent = known ? number(status.jobs) : NONE;
  const failed = status.failures.reduce((sum, failure) => sum + failure.count, 0);
  id("failed").textContent = known ? number(failed) : NONE;
  id("failed").className = failed ? "bad" : "";
  id("dead_letters").textContent = number(status.dead_letters);
  rows("devices", status.devices.map(deviceRow), "No device answers.", 6);
  rows("queues", status.queues.map(queueRow), "No queue is known.", 3);
  const failures = status.failures.map((each) => [[each.error], [number(each.count)]]);
  rows("failures", failures, "None.", 2);
  showModels(status.models);
  if (known) showFiles();
}

function showState(status) {
  const found = [];
  if (status.problem !== null) {
    say("Redis is away", "bad");
    found.push(`Redis does not answer, so nothing is known now: ${status.problem}`);
  } else if (!status.workers) {
    say("no worker answers", "bad");
    found.push("No worker answers. Jobs wait in Redis until one starts: batchery up, or celery worker.");
  } else {
    say(`${status.workers} ${status.workers === 1 ? "worker" : "workers"}`, "good");
  }
  found.push(...status.notes);
  if (status.age_s > OLD_S) found.push(`These figures are ${age(status.age_s)} old.`);
  notices(found);
}

function say(text, kind) {
  const state = id("state");
  // Screen readers read it out, so only what is new is set.
  if (state.textContent !== text) state.textContent = text;
  state.className = `state ${kind}`;
}

function notices(texts) {
  const there = [...id("notices").children].map((each) => each.textContent);
  if (there.join("\n") === texts.join("\n")) return;
  id("notices").replaceChildren(...texts.map((text) => make("p", text, "notice")));
}

function showThroughput(now) {
  id("items_per_s").textContent = now ? rate(now.items_per_s) : NONE;
  id("rates").textContent = now
    ? `${rate(now.jobs_per_s)} jobs/s, ${rate(now.tokens_per_s)} tokens/s`
    : NONE;
  if (now) history.push(now.items_per_s);
  if (history.length > HISTORY) history.shift();
  const peak = Math.max(...history, 0);
  const points = history.map((value, place) => {
    const x = HISTORY - history.length + place + 1;
    return `${x},${(38 - (36 * value) / (peak || 1)).toFixed(2)}`;
  });
  id("spark_line").setAttribute("points", points.join(" "));
  const first = HISTORY - history.length + 1;
  const area = points.length ? `${first},40 ${points.join(" ")} ${HISTORY},40` : "";
  id("spark_area").setAttribute("points", area);
  const text = history.length ? `last two minutes, up to ${rate(peak)}` : "";
  id("spark_text").textContent = text;
  id("spark").setAttribute("aria-label", `Items per second: ${text}`);
}

const since = (value) => (value === NONE ? "" : `${value} since start`);

function deviceRow(device) {
  const memory = device.memory_bytes === null ? device.resident_bytes : device.memory_bytes;
  const size = device.memory_size_bytes === null ? "main memory" : `of ${bytes(device.memory_size_bytes)}`;
  return [
    [device.name, `${device.worker}, ${device.state}`],
    [rate(device.items_per_s), "", "Items/s"],
    [percent(device.busy), "", "Busy"],
    [number(device.batch_size, 1), since(number(device.mean_batch_size, 1)), "Batch size"],
    [percent(device.padding_waste), since(percent(device.mean_padding_waste)), "Padding waste"],
    [bytes(memory), memory === null ? "" : size, "Memory"],
  ];
}

function queueRow(queue) {
  const held = queue.in_workers ? `${number(queue.in_workers)} in workers` : "";
  return [[queue.name], [number(queue.waiting), held], [queue.waiting ? age(queue.oldest_s) : NONE]];
}

// Each row is a list of cells: text, a smaller text below it, and the column's name on a phone.
function rows(name, found, none, columns) {
  const body = id(name);
  if (!found.length) {
    const cell = make("td", none, "muted");
    cell.colSpan = columns;
    const row = make("tr");
    row.append(cell);
    body.replaceChildren(row);
    return;
  }
  body.replaceChildren(...found.map(tableRow));
}

function tableRow(cells) {
  const row = make("tr");
  row.setAttribute("role", "row");
  cells.forEach(([text, below, column], place) => {
    const cell = make("td", "", place ? "amount" : "");
    cell.setAttribute("role", "cell");
    if (column) cell.dataset.name = column;
    const both = make("div", text);
    if (below) both.append(make("small", below));
    cell.append(both);
    row.append(cell);
  });
  return row;
}

// Files and batches: asked for more rarely, and never waited for.

async function showFiles() {
  if (Date.now() < filesDue) return;
  filesDue = Infinity;
  let batches = [];
  let files = [];
  let none = "None.";
  try {
    const paths = ["/v1/batches", "/v1/files"].map((path) => ask(`${path}?limit=${SHOWN_FILES}`));
    [batches, files] = (await Promise.all(paths)).map((found) => found.data);
  } catch (error) {
    none = error.message;
  }
  const names = Object.fromEntries(files.map((file) => [file.id, file.filename]));
  rows("batches", batches.map((batch) => batchRow(batch, names)), none, 3);
  rows("files", files.map(fileRow), none, 3);
  filesDue = Date.now() + FILES_INTERVAL_MS;
}

function batchRow(batch, names) {
  const { total, completed, failed } = batch.request_counts;
  const done = total ? percent((completed + failed) / total) : NONE;
  const counts = `${number(completed)} of ${number(total)}${failed ? `, ${number(failed)} failed` : ""}`;
  return [[names[batch.input_file_id] ?? batch.input_file_id, batch.id], [batch.status], [done, counts]];
}

function fileRow(file) {
  return [[file.filename, file.id], [file.purpose], [bytes(file.bytes)]];
}

// How models are called

function modelParts(model) {
  const command = make("pre", curlLine(model));
  const button = make("button", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", `Copy the command for ${model.name}`);
  button.addEventListener("click", () => copy(command, button));
  const aliases = model.aliases.length ? `, also called ${model.aliases.join(", ")}` : "";
  const parts = make("div", "", "model");
  parts.append(make("p", `${model.name} (${model.kind})${aliases}`), command, button);
  return parts;
}

function curlLine({ name, kind }) {
  const start = `curl ${location.origin}`;
  const key = sessionStorage.getItem(KEY) ? ` -H "Authorization: Bearer $BATCHERY_KEY"` : "";
  if (kind === "transcription") return `${start}${SPEECH}${key} -F model=${name} -F file=@call.wav`;
  const text = FILES[kind] ? `data:${FILES[kind]}/…;base64,…` : "The food was delicious";
  const wanted = wish(kind, text, MORE[kind]?.example ?? "");
  const [path, body] = CALLS[kind]?.(name) ?? ["/page/try", { model: name, ...wanted }];
  const json = JSON.stringify(body).replaceAll("'", "'\\''");
  return `${start}${path}${key} -H "Content-Type: application/json" -d '${json}'`;
}

async function copy(command, button) {
  try {
    await navigator.clipboard.writeText(command.textContent);
    button.textContent = "Copied";
  } catch {
    // Without TLS browsers have no clipboard; so it is marked, and the reader copies it.
    getSelection().selectAllChildren(command);
  }
}

// Try a model

function showModels(found) {
  const names = JSON.stringify(found);
  if (names === models) return;
  models = names;
  const options = found.map((model) => {
    const option = make("option", `${model.name} (${model.kind})`);
    option.value = model.name;
    option.dataset.kind = model.kind;
    return option;
  });
  id("model").replaceChildren(...options);
  id("models").replaceChildren(...found.map(modelParts));
  showMore();
  id("run").disabled = !found.length;
  if (!found.length) id("answer").replaceChildren(make("p", "The settings name no model.", "muted"));
}

id("model").addEventListener("change", showMore);

const kindOf = (model) => model?.dataset.kind ?? "";

function showMore() {
  const kind = kindOf(id("model").selectedOptions[0]);
  const [more, medium] = [MORE[kind], FILES[kind]];
  id("file_label").hidden = !medium;
  id("file_name").textContent = medium === "image" ? "Drop a picture here, or choose one" : "Drop a sound here, or choose one";
  id("file").accept = medium ? `${medium}/*` : "";
  id("file").value = "";
  id("item_name").textContent = medium ? 'Or its URL, or {"text": "…"}' : "Text, or an item as JSON";
  id("item").required = !medium;
  if (medium) id("item").value = "";
  id("more_label").hidden = !more;
  id("more").required = Boolean(more);
  id("more_name").textContent = more?.name ?? "";
  id("more").value = more?.example ?? "";
}

for (const name of ["dragover", "drop"]) {
  id("try").addEventListener(name, (event) => {
    if (id("file_label").hidden) return;
    event.preventDefault(); // A browser would open the file.
    if (name === "dragover" || !event.dataTransfer.files.length) return;
    id("file").files = event.dataTransfer.files;
    id("try").requestSubmit();
  });
}

id("file").addEventListener("change", () => id("try").requestSubmit());

// A file as a data URL.
function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

id("try").addEventListener("submit", async (event) => {
  event.preventDefault();
  const chosen = id("model").selectedOptions[0];
  const [file] = id("file").files;
  if (typing) {
    typing.abort();
    return;
  }
  if (kindOf(chosen) === "generation") {
    await type(chosen.value, id("item").value);
    return;
  }
  id("run").disabled = true;
  id("answer").replaceChildren(make("p", "Running …", "muted"));
  try {
    if (file && kindOf(chosen) === "transcription") {
      await transcribe(chosen.value, file);
      return;
    }
    const item = file ? await dataUrl(file) : id("item").value;
    const answer = await ask("/page/try", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model: chosen.value,
        ...wish(kindOf(chosen), item, id("more").value),
      }),
    });
    id("answer").replaceChildren(...answerParts(answer));
  } catch (error) {
    id("answer").replaceChildren(make("p", error.message, "error"));
  } finally {
    id("run").disabled = false;
  }
});

// Speech: the text grows as the model hears it.

const SPEECH = "/v1/audio/transcriptions";

async function transcribe(model, file) {
  const form = new FormData();
  for (const [name, value] of Object.entries({ model, file, stream: "true" })) form.append(name, value);
  const shown = make("pre", "", "typed");
  const facts = make("p", "Listening …", "muted");
  const began = performance.now();
  const response = await send(SPEECH, { method: "POST", body: form });
  if (!response.ok) await read(response);
  id("answer").replaceChildren(facts, shown);
  for await (const event of events(response)) {
    if (event.error) throw new Refused(event.error.message, response.status);
    if (event.delta) shown.append(event.delta);
    else shown.textContent = event.text;
  }
  facts.textContent = `${file.name}, ${number(performance.now() - began)} ms`;
}

// Text generation: the answer grows as the model writes it.

let typing = null; // What ends the stream that is shown.

const chatOf = (text) => [{ role: "user", content: text }];

async function type(model, text) {
  const given = itemOf(text);
  const messages = Array.isArray(given) ? given : chatOf(text);
  const shown = make("pre", "", "typed");
  const facts = make("p", "Waiting …", "muted");
  id("answer").replaceChildren(facts, shown);
  typing = new AbortController();
  id("run").textContent = "Stop";
  const wanted = { model, stream: true, stream_options: { include_usage: true } };
  const began = performance.now();
  let stream = "";
  try {
    let response = await post("/v1/chat/completions", { ...wanted, messages });
    // A model without a template for chats goes on with the text.
    if (response.status === 400) {
      const other = await post("/v1/completions", { ...wanted, prompt: text });
      if (other.ok) response = other;
    }
    if (!response.ok) await read(response);
    for await (const event of events(response)) {
      if (event.error) throw new Refused(event.error.message, response.status);
      stream = event.id;
      for (const choice of event.choices) shown.append(choice.delta?.content ?? choice.text ?? "");
      const { completion_tokens: tokens } = event.usage ?? {};
      const seconds = (performance.now() - began) / 1000;
      facts.textContent = tokens ? `${number(tokens)} tokens, ${rate(tokens / seconds)} tokens/s` : "Writing …";
    }
  } catch (error) {
    if (error.name === "AbortError") facts.textContent = "Stopped.";
    else id("answer").append(make("p", error.message, "error"));
    if (stream) send(`/v1/chat/completions/${stream}`, { method: "DELETE" }).catch(() => {});
  }
  typing = null;
  id("run").textContent = "Run";
}

const post = (path, body) =>
  send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: typing.signal,
  });

// What the events of an answer say, as JSON.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice("data: ".length));
    }
  }
}

// The item, and the keywords of the model's task.
function wish(kind, text, more) {
  const item = itemOf(text);
  if (kind === "rerank" && item === text) return { item: { query: more, text } };
  if (kind === "zero_shot_image_classification") {
    return { item, keywords: { labels: more.split(",").map((label) => label.trim()) } };
  }
  return { item, keywords: kind.endsWith("classification") ? { top_k: 5 } : {} };
}

// JSON's lists and objects are items that are no text: pairs of texts, or token ids.
function itemOf(text) {
  if (!/^\s*[[{]/.test(text)) return text;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function answerParts({ kind, result, duration_ms }) {
  const facts = [`${number(duration_ms, 1)} ms`];
  if (typeof result?.tokens === "number") facts.unshift(`${number(result.tokens)} tokens`);
  if (result?.truncated) facts.push("the text was too long, and its end was cut off");
  const long = linesOf(result);
  if (long) {
    const [size, lines] = long;
    const shown = lines.length > FIRST ? [...lines.slice(0, FIRST), "…"] : lines;
    return [make("p", [size, ...facts].join(", "), "muted"), make("pre", shown.join("\n"))];
  }
  const scores = scoresOf(kind, result);
  if (scores) {
    return [make("p", facts.join(", "), "muted"), ...scores.map(scoreRow)];
  }
  const text = JSON.stringify(result, null, 2);
  const shown = text.length > MAX_CHARS ? `${text.slice(0, MAX_CHARS)} …` : text;
  return [make("p", facts.join(", "), "muted"), make("pre", shown)];
}

// The size of a vector, a sparse one or the vectors of a text, and its lines; null for another one.
function linesOf(result) {
  const { vector, vectors, indices, values } = result ?? {};
  const numbers = (some, count) => some.slice(0, count).map((each) => each.toFixed(4)).join("  ");
  if (Array.isArray(vector)) return [`${number(vector.length)} numbers`, [`${numbers(vector, FIRST)}  …`]];
  if (Array.isArray(vectors)) {
    const size = `${number(vectors.length)} vectors of ${number(vectors[0]?.length)} numbers`;
    return [size, vectors.map((each) => `${numbers(each, FIRST / 2)}  …`)];
  }
  if (!Array.isArray(indices)) return null;
  const weights = indices.map((token, place) => [token, values[place]]).sort((a, b) => b[1] - a[1]);
  const lines = weights.map(([token, weight]) => `token ${token}: ${weight.toFixed(4)}`);
  return [`${number(lines.length)} weights, the largest first`, lines];
}

// Names and scores that are shown as bars; null for another kind of result.
function scoresOf(kind, result) {
  if (result?.objects) return result.objects.map(({ label, score }) => [label, score]);
  if (result?.scores) return Object.entries(result.scores);
  if (kind === "rerank" && typeof result?.score === "number") return [["score", result.score]];
  return null;
}

function scoreRow([label, score]) {
  const row = make("div", "", "score");
  const bar = make("div", "", "bar");
  const filled = make("div");
  filled.style.width = `${100 * Math.max(0, Math.min(1, score))}%`;
  bar.append(filled);
  row.append(make("span", label), bar, make("span", number(score, 3)));
  return row;
}

look();
