// A button on each block of code that copies it: of lines with a prompt (`$`, `>>>`) those, without it.
const PROMPT = /^(\$|>>>|\.\.\.)( |$)/;

function textOf(block) {
  const lines = block.textContent.trimEnd().split("\n");
  const commands = lines.filter((line) => PROMPT.test(line)).map((line) => line.replace(PROMPT, ""));
  return (commands.length ? commands : lines).join("\n") + "\n";
}

function addCopyButtons() {
  if (!navigator.clipboard) return; // a page that is served without encryption
  for (const block of document.querySelectorAll("div:not(.highlight-text) > div.highlight > pre")) {
    const text = textOf(block);
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 2000);
    });
    block.prepend(button);
  }
}

// A table that is wider than the screen gets its cells below each other, each with the head of its column.
function stackTables() {
  for (const wrapper of document.querySelectorAll(".table-wrapper")) {
    const table = wrapper.querySelector("table");
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, i) => (cell.dataset.head = heads[i] ?? ""));
    table.classList.remove("stacked");
    table.classList.toggle("stacked", wrapper.scrollWidth > wrapper.clientWidth + 1);
  }
}

document.addEventListener("DOMContentLoaded", addCopyButtons);
window.addEventListener("load", stackTables);
window.addEventListener("resize", stackTables);
