"use strict";
const $ = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const IDEAS = ["Tell me a story about a mill and a fox.", "What is a candle?", "Give me three tips for a rainy day."];
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "n", "repetition_penalty",
  "presence_penalty", "frequency_penalty"];
let turns = [];        // {asked, mode, answers: [{text}], chosen}
let controller = null; // of the request that runs
let model = "";

const headers = () => {
  const key = $("key").value.trim();
  return key ? { Authorization: "Bearer " + key } : {};
};

// The request

function body(prompt) {
  const chat = $("mode").value === "chat";
  const request = { model, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    const value = $(name).value.trim();
    if (value !== "") request[name] = Number(value);
  }
  const stop = $("stopstrings").value.split("\n").filter((line) => line !== "");
  if (stop.length) request.stop = stop;
  if ($("logprobs").checked) Object.assign(request, chat ? { logprobs: true, top_logprobs: 3 } : { logprobs: 3 });
  if (!chat) return { ...request, prompt };
  const messages = [];
  if ($("system").value.trim()) messages.push({ role: "system", content: $("system").value.trim() });
  for (const turn of turns.filter((turn) => turn.mode === "chat" && turn.answers.length)) {
    messages.push({ role: "user", content: turn.asked });
    messages.push({ role: "assistant", content: turn.answers[turn.chosen].text });
  }
  messages.push({ role: "user", content: prompt });
  return { ...request, messages };
}

const path = () => ($("mode").value === "chat" ? "/v1/chat/completions" : "/v1/completions");

async function send(prompt) {
  const request = body(prompt);
  const turn = { asked: prompt, mode: $("mode").value, answers: [], chosen: 0 };
  const view = showTurn(turn, request.n || 1);
  turns.push(turn);
  controller = new AbortController();
  busy(true);
  const started = performance.now();
  try {
    const response = await fetch(path(), {
      method: "POST", signal: controller.signal, body: JSON.stringify(request),
      headers: { "Content-Type": "application/json", ...headers() },
    });
    if (!response.ok) throw await refusal(response);
    await readEvents(response, (id, data) => onChunk(turn, view, started, id, data));
  } catch (error) {
    if (error.name !== "AbortError") view.fail(error.message);
  }
  view.end(controller.signal.aborted);
  if (turn.answers.length === 0) {
    turns = turns.filter((other) => other !== turn);
    if (!$("prompt").value) { $("prompt").value = prompt; fit(); }
  }
  controller = null;
  busy(false);
}

async function refusal(response) {
  const after = response.headers.get("Retry-After");
  let message = response.status + " " + response.statusText;
  try { message = (await response.json()).error.message; } catch { /* not JSON: the status will do */ }
  return new Error(message + (after ? " (try again in " + after + " s)" : ""));
}

// Server-sent events by the HTML standard; EventSource itself can only GET.
async function readEvents(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "", id = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("id: ")) id = line.slice(4);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length && data[0] !== "[DONE]") onEvent(id, JSON.parse(data.join("\n")));
    }
  }
}

function onChunk(turn, view, started, id, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) view.usage(chunk.usage);
  for (const choice of chunk.choices) {
    const answer = (turn.answers[choice.index] ??= { text: "" });
    const text = choice.delta ? choice.delta.content || "" : choice.text;
    answer.text += text;
    view.answers[choice.index].add(text, choice.logprobs, id, performance.now() - started);
    if (choice.finish_reason) view.answers[choice.index].finish(choice.finish_reason, id);
  }
}

// The conversation's view

function showTurn(turn, count) {
  $("empty").hidden = true;
  const node = make("div", "turn");
  node.append(make("div", "asked", turn.asked));
  const grid = make("div", "answers" + (count > 1 ? " several" : ""));
  const answers = Array.from({ length: count }, (_, index) => answerView(index));
  grid.append(...answers.map((answer) => answer.node));
  node.append(grid);
  const choose = (chosen) => {
    turn.chosen = chosen;
    answers.forEach((answer, index) => answer.node.classList.toggle("chosen", index === chosen));
  };
  answers.forEach((answer, index) => answer.node.addEventListener("click", () => choose(index)));
  choose(0);
  $("log").append(node);
  scroll(true);
  return {
    answers,
    usage(usage) {
      const cached = usage.prompt_tokens_details.cached_tokens;
      const text = usage.prompt_tokens + " prompt tokens" + (cached ? ", " + cached + " cached" : "");
      answers[0].note("usage", text);
      if (count === 1) answers[0].tokens(usage.completion_tokens);
    },
    fail(message) { grid.after(make("div", "error", message)); scroll(); },
    end(stopped) {
      answers.forEach((answer) => answer.end(stopped));
      if (answers.every((answer) => answer.empty)) grid.remove();
    },
  };
}

function answerView(index) {
  const node = make("div", "answer running");
  const text = make("div", "text"), meta = make("div", "meta");
  node.append(text, meta);
  const notes = {};
  let first = 0, last = 0, events = 0, reason = "";
  const note = (name, value) => {
    if (!notes[name]) meta.append((notes[name] = make("span")));
    notes[name].textContent = value;
  };
  const rate = (tokens) => {
    if (tokens > 1 && last > first) note("rate", ((tokens - 1) / (last - first) * 1000).toFixed(1) + " tok/s");
    note("count", tokens + (tokens === 1 ? " token" : " tokens"));
  };
  const number = (id) => note("seq", "seq " + id.split(",")[index]);
  return {
    node, note,
    get empty() { return events === 0 && !reason; },
    add(piece, logprobs, id, at) {
      if (!piece) return;
      if (!first) { first = at; note("ttft", "first after " + at.toFixed(0) + " ms"); }
      last = at;
      events += 1;
      if (logprobs) text.append(...sure(logprobs)); else text.append(piece);
      rate(events);
      number(id);
      scroll();
    },
    tokens(count) { rate(count); },
    finish(why, id) {
      reason = why;
      node.classList.remove("running");
      number(id);
      if (!events) text.append(make("i", "", "The answer is empty."));
      note("reason", "ended: " + why);
    },
    end(stopped) {
      node.classList.remove("running");
      if (!reason && stopped) note("reason", "stopped here");
    },
  };
}

// Spans tinted by doubt, with the alternatives as their tooltip. Both APIs' shapes.
function sure(logprobs) {
  const entries = logprobs.content
    ? logprobs.content.map((e) => [e.token, e.logprob, e.top_logprobs.map((t) => [t.token, t.logprob])])
    : logprobs.tokens.map((t, i) => [t, logprobs.token_logprobs[i], Object.entries(logprobs.top_logprobs[i])]);
  return entries.map(([token, logprob, top]) => {
    const span = make("span", "token", token);
    span.style.setProperty("--doubt", (1 - Math.exp(logprob)).toFixed(3));
    span.title = [[token, logprob], ...top.filter(([other]) => other !== token)]
      .map(([other, lp]) => JSON.stringify(other) + " " + (100 * Math.exp(lp)).toFixed(1) + " %").join("\n");
    return span;
  });
}

function scroll(force) {
  const log = $("log");
  if (force || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function busy(running) {
  $("send").disabled = running;
  $("stop").disabled = !running;
  if (!running) $("prompt").focus();
}
