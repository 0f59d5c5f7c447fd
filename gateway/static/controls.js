// Controls

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = $("prompt").value;
  if (controller || prompt.trim() === "") return;
  $("prompt").value = "";
  fit();
  send(prompt);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && controller) controller.abort(); });
$("stop").addEventListener("click", () => controller && controller.abort());
$("clear").addEventListener("click", () => {
  if (controller) controller.abort();
  turns = [];
  $("log").replaceChildren($("empty"));
  $("empty").hidden = false;
});
$("curl").addEventListener("click", async () => {
  const quoted = JSON.stringify(body($("prompt").value || "Hello")).replaceAll("'", "'\\''");
  const key = $("key").value.trim() ? " -H 'Authorization: Bearer KEY'" : "";
  await navigator.clipboard.writeText("curl -N " + location.origin + path() + key +
    " -H 'Content-Type: application/json' -d '" + quoted + "'");
  $("curl").textContent = "Copied";
  setTimeout(() => { $("curl").textContent = "Copy as curl"; }, 1500);
});
$("mode").addEventListener("change", () => {
  const chat = $("mode").value === "chat";
  $("systemfield").hidden = !chat;
  $("prompt").placeholder = chat ? "Your message" : "The beginning of a text";
});
$("key").addEventListener("change", () => { sessionStorage.setItem("headrace-key", $("key").value); model = ""; });
const fit = () => {
  $("prompt").style.height = "auto";
  $("prompt").style.height = $("prompt").scrollHeight + "px";
};
$("prompt").addEventListener("input", fit);
$("key").value = sessionStorage.getItem("headrace-key") || "";
for (const idea of IDEAS) {
  const button = make("button", "button", idea);
  button.type = "button";
  button.addEventListener("click", () => { $("prompt").value = idea; fit(); $("prompt").focus(); });
  $("ideas").append(button);
}
watch();
