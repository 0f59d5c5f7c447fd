// The dashboard

const history = [];  // [seconds, metrics]
const total = (metrics, name) => metrics.get("headrace:" + name) || 0;

function parseMetrics(page) {
  const sums = new Map();
  for (const line of page.split("\n")) {
    if (!line || line[0] === "#") continue;
    const name = line.slice(0, line.search(/[{ ]/));
    sums.set(name, (sums.get(name) || 0) + Number(line.slice(line.lastIndexOf(" ") + 1)));
  }
  return sums;
}

function change(name) {
  return history.length < 2 ? 0 : total(history.at(-1)[1], name) - total(history[0][1], name);
}

function mean(name) {
  const count = change(name + "_count");
  return count ? duration(change(name + "_sum") / count) : "–";
}

const duration = (seconds) => (seconds < 1 ? (seconds * 1000).toFixed(seconds < .01 ? 1 : 0) + " ms" : seconds.toFixed(1) + " s");

function showMetrics(metrics) {
  history.push([performance.now() / 1000, metrics]);
  if (history.length > 60) history.shift();
  for (const name of ["running", "waiting", "parked"]) $(name).textContent = total(metrics, "num_requests_" + name);
  const engines = total(metrics, "engine_up") || 1;
  const kv = 100 * total(metrics, "kv_cache_usage_perc") / engines;
  $("kv").textContent = kv.toFixed(kv < 10 ? 1 : 0) + " %";
  $("kvbar").style.width = kv + "%";
  const rates = history.slice(1).map(([at, now], i) => {
    const [before, then] = history[i];
    return Math.max(0, (total(now, "generation_tokens_total") - total(then, "generation_tokens_total")) / (at - before));
  });
  $("rate").textContent = rates.length ? rates.at(-1).toFixed(rates.at(-1) < 10 ? 1 : 0) : "–";
  spark(rates);
  $("ttft").textContent = mean("time_to_first_token_seconds");
  $("itl").textContent = mean("inter_token_latency_seconds");
  const queries = total(metrics, "prefix_cache_queries_total");
  $("hits").textContent = queries ? (100 * total(metrics, "prefix_cache_hits_total") / queries).toFixed(0) + " %" : "–";
}

function spark(rates) {
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, i) => (59 - rates.length + 1 + i) + " " + (19 - 17 * rate / top).toFixed(2));
  const [area, line] = $("spark").children;
  line.setAttribute("d", points.length ? "M" + points.join("L") : "");
  area.setAttribute("d", points.length ? "M" + (59 - rates.length + 1) + " 20L" + points.join("L") + "L59 20Z" : "");
}

function status(kind, text) {
  $("status").className = kind;
  $("status").textContent = text;
}

async function watch() {
  try {
    if (!document.hidden) {
      const [ready, metrics] = await Promise.all([fetch("/ready"), fetch("/metrics")]);
      if (ready.ok) status("ready", "ready");
      else status("waiting", (await ready.json()).reason || "not ready");
      if (metrics.ok) showMetrics(parseMetrics(await metrics.text()));
      if (!model) await learnModel();
    }
  } catch { status("offline", "no answer from the server"); }
  setTimeout(watch, 1000);
}

async function learnModel() {
  const response = await fetch("/v1/models", { headers: headers() });
  $("model").textContent = response.status === 401 ? "an API key is needed" : "";
  if (!response.ok) return;
  const found = (await response.json()).data[0];
  model = found.id;
  $("model").textContent = model + (found.max_model_len ? ", context " + found.max_model_len : "");
}
